"""Masks and scores to measure as functions: what each captures, what says the same without a function, and its bars.

A function is FlexAttention's: fn(b, h, i, j, ...) or fn(s, b, h, i, j, ...), and captured tensors come last. One text
serves tilewise, FlexAttention and plain torch, to which all of them are compared.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise as tw

from .suites import BACKWARD, FORWARD

ATTENTION_BIAS = "sdpa efficient"
"""PyTorch's kernel that takes a bias as attn_mask, and has its gradient."""
PASSES = (FORWARD, BACKWARD)
ONE_TILE = "Bias, one tile a head"
"""Names what a call takes by default: the kernels that keep a whole score matrix (triton/single)."""


class Size(NamedTuple):
    """Self-attention of N tokens: q, k, v (B, N, H, D)."""

    B: int
    N: int
    H: int = 16
    D: int = 128

    def __str__(self) -> str:
        return f"B{self.B} H{self.H} D{self.D} N{self.N}"


class Bar(NamedTuple):
    """The least ratio of times, another's over `ours`, that we want."""

    than: str
    least: float
    passes: tuple[str, ...] = PASSES
    ours: str = "tilewise"


class Made(NamedTuple):
    """A mask or score for one size."""

    what: str
    """ "mask" or "score"."""
    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()
    """What it captures; those that learn require a gradient."""
    ours: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Options of `attention` that say the same without a function, by name."""
    bias: Tensor | None = None
    """What SDPA gets as attn_mask."""

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """Return the tensors that get a gradient."""
        return tuple([t for t in self.tensors if t.requires_grad])


@dataclass(frozen=True)
class Mod:
    """A mask or score at some sizes."""

    name: str
    make: Callable[[Size, torch.Generator], Made]
    """It draws on the generator's device."""
    sizes: tuple[Size, ...]
    bars: tuple[Bar, ...]
    tokens: int | None = None
    """Of every size, for images cut into windows."""

    def of_length(self, N: int) -> Size:
        """Return a small size; results are checked at such a one."""
        first = self.sizes[0]
        return Size(2, self.tokens or N, min(4, first.H), first.D)


LONG = Size(2, 8192), Size(1, 16384)
IMAGES = Size(2, 96 * 96), Size(1, 128 * 128)
SHORT = (Size(2, 4096),)
FLEX = Bar("flex", 1.2)
WIDTH, SINKS, BLOCK, RADIUS = 1024, 4, 128, 3
MODS: dict[str, Mod] = {}


def mod(name: str, *bars: Bar, sizes: tuple[Size, ...] = LONG, tokens: int | None = None) -> Callable[..., Any]:
    """Add what a function makes to MODS."""
    return lambda make: MODS.setdefault(name, Mod(name, make, sizes, bars, tokens)).make


def normal(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor that learns."""
    return torch.randn(shape, generator=draw, device=draw.device, dtype=dtype).requires_grad_()


@mod("causal", FLEX, Bar("tilewise Causal", 0.99))
def causal(size: Size, draw: torch.Generator) -> Made:
    """Make the causal mask."""
    return Made("mask", lambda b, h, i, j: j <= i, ours={"Causal": {"mask": tw.Causal()}})


@mod("window", FLEX, Bar("tilewise Window", 0.99))
def window(size: Size, draw: torch.Generator) -> Made:
    """Make a causal window of WIDTH keys, of fewer among few."""
    width = min(WIDTH, size.N // 4)
    ours = {"Window": {"mask": tw.Window(width - 1, 0)}}
    return Made("mask", lambda b, h, i, j: (j <= i) & (i - j < width), ours=ours)


@mod("sinks and window", FLEX)
def sinks_and_window(size: Size, draw: torch.Generator) -> Made:
    """Make the same window beside the first SINKS keys."""
    width = min(WIDTH, size.N // 4)
    return Made("mask", lambda b, h, i, j: (j <= i) & ((j < SINKS) | (i - j < width)))


@mod("neighbourhood 7 x 7", FLEX, sizes=IMAGES)
def neighbourhood(size: Size, draw: torch.Generator) -> Made:
    """Make NATTEN's mask of a square image: as many keys at its edges as in its middle."""
    side = math.isqrt(size.N)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        x, y = (i // side).clamp(RADIUS, side - 1 - RADIUS), (i % side).clamp(RADIUS, side - 1 - RADIUS)
        return ((x - j // side).abs() <= RADIUS) & ((y - j % side).abs() <= RADIUS)

    return Made("mask", near)


def documents(size: Size, draw: torch.Generator, pieces: int) -> Made:
    """Cut every sequence into pieces of random lengths, which see themselves alone."""
    cuts = [torch.randperm(size.N - 1, generator=draw, device=draw.device)[: pieces - 1] + 1 for _ in range(size.B)]
    ends = torch.stack([torch.cat([t.sort().values, t.new_tensor([size.N])]) for t in cuts]).int()
    tokens = torch.arange(size.N, device=draw.device, dtype=torch.int32).expand(size.B, -1).contiguous()
    ids = torch.searchsorted(ends, tokens, right=True, out_int32=True)
    hi = ends.gather(1, ids.long())
    lo = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1).gather(1, ids.long())
    ours = {"Documents": {"mask": tw.Documents(ids, ids)}, "Spans": {"mask": tw.Spans(lo, hi)}}
    return Made("mask", lambda b, h, i, j, ids: ids[b, i] == ids[b, j], (ids,), ours)


@mod("documents", FLEX)
def few_documents(size: Size, draw: torch.Generator) -> Made:
    """Make documents of 1024 tokens on average."""
    return documents(size, draw, max(3, size.N // 1024))


@mod(
    "documents, 100 pieces", Bar("flex", 1.5), Bar("flex", 1.5, ours="tilewise Documents"),
    Bar("flex", 1.5, ours="tilewise Spans"), sizes=LONG[1:],
)  # fmt: skip
def many_documents(size: Size, draw: torch.Generator) -> Made:
    """Make 100 short documents."""
    return documents(size, draw, min(100, size.N // 8))


@mod("block-sparse 0.1", FLEX)
def block_sparse(size: Size, draw: torch.Generator) -> Made:
    """Make blocks of BLOCK x BLOCK, of which a head sees a tenth at random, and those on the diagonal."""
    block = min(BLOCK, size.N // 4)
    count = -(-size.N // block)
    table = torch.rand(size.H, count, count, generator=draw, device=draw.device) < 0.1
    table |= torch.eye(count, dtype=torch.bool, device=draw.device)
    found: Any = tw
    ours = {"Blocks": {"mask": found.Blocks(lists(table), block)}} if hasattr(tw, "Blocks") else {}
    return Made("mask", lambda b, h, i, j, table: table[h, i // block, j // block], (table,), ours)


def lists(table: Tensor) -> Tensor:
    """Return the columns that each row of (H, rows, columns) sees, then -1: (1, H, rows, width)."""
    width = int(table.sum(-1).max())
    order = (~table).int().argsort(dim=-1, stable=True)
    return order.masked_fill(~table.gather(-1, order), -1)[None, ..., :width].int().contiguous()


@mod("softcap and ALiBi", FLEX, Bar("tilewise SoftCap, Alibi", 0.97))
def softcap_and_alibi(size: Size, draw: torch.Generator) -> Made:
    """Make two scores, one after the other."""
    slopes = torch.exp2(-8.0 / size.H * torch.arange(1, size.H + 1, device=draw.device))
    ours = {"SoftCap, Alibi": {"score": (tw.SoftCap(20.0), tw.Alibi(slopes))}}
    return Made(
        "score", lambda s, b, h, i, j, slopes: 20.0 * torch.tanh(s / 20.0) - slopes[h] * (i - j).abs(), (slopes,), ours
    )


@mod("relative table", FLEX)
def relative(size: Size, draw: torch.Generator) -> Made:
    """Make a number for each distance and head; they learn."""
    last = size.N - 1
    return Made("score", lambda s, b, h, i, j, table: s + table[h, i - j + last], (normal(draw, size.H, 2 * last + 1),))


@mod("T5", Bar("flex", 1.7), sizes=SHORT)
def t5(size: Size, draw: torch.Generator) -> Made:
    """Make T5's 32 buckets of distances for each head; they learn."""

    def bucketed(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        n = (i - j).abs()
        # 1e-3: no bucket begins where rounding decides
        far = 8 + (2.0 * torch.log2(n.clamp(min=1).float() / 8.0) + 1e-3).to(torch.int32)
        return s + table[torch.where(n < 8, n, far.clamp(max=15)) + torch.where(j > i, 16, 0), h]

    return Made("score", bucketed, (normal(draw, 32, size.H),))


def biased(draw: torch.Generator, *shape: int) -> Made:
    """Add a bias (H, N, N) that learns, in q's type, as SDPA wants it."""
    bias = normal(draw, *shape, dtype=torch.bfloat16)
    ours: Any = {"Bias": {"score": tw.Bias(bias)}}
    return Made("score", lambda s, b, h, i, j, bias: s + bias[h, i, j], (bias,), ours, bias)


@mod("full bias", Bar("flex", 1.2, (FORWARD,)), Bar("flex", 1.1, (BACKWARD,)), sizes=SHORT)
def full_bias(size: Size, draw: torch.Generator) -> Made:
    """Make a bias for all pairs of tokens."""
    return biased(draw, size.H, size.N, size.N)


WINDOWS = (
    Bar(ATTENTION_BIAS, 1.2, (FORWARD,), ours=f"tilewise {ONE_TILE}"),
    Bar(ATTENTION_BIAS, 1.0, (BACKWARD,), ours=f"tilewise {ONE_TILE}"),
)


@mod("Swin", *WINDOWS, sizes=(Size(4096, 49, 8, 32),), tokens=49)
def swin(size: Size, draw: torch.Generator) -> Made:
    """Make a bias that all windows of 7 x 7 tokens share."""
    return of_one_tile(biased(draw, size.H, size.N, size.N))


@mod("Swin, shifted windows", *WINDOWS, sizes=(Size(1024, 49, 8, 32),), tokens=49)
def swin_shifted(size: Size, draw: torch.Generator) -> Made:
    """Make a bias for each window, as timm adds the mask of shifted windows to the one that they share."""
    bias = normal(draw, size.B, size.H, size.N, size.N, dtype=torch.bfloat16)
    ours: Any = {"Bias": {"score": tw.Bias(bias)}}
    return of_one_tile(Made("score", lambda s, b, h, i, j, bias: s + bias[b, h, i, j], (bias,), ours, bias))


def of_one_tile(made: Made) -> Made:
    """Return a bias with the call that names the kernels of one tile a head."""
    return made._replace(ours={**made.ours, ONE_TILE: made.ours["Bias"] | {"backend": "triton"}})
