"""Problem: one frozen, hashable description of a call.

A `Recipe` is what the caller chose, without any tensor: it crosses torch's dispatcher as text. A `Problem` is a recipe
plus the shapes, types, strides and device of the operands. Choosing a back end, tiles and kernels are functions of it.
"""

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import mask as masks
from . import score as scores
from .layout import Varlen
from .mask import Mask, Value
from .score import Score

KINDS: dict[str, type[Value]] = {
    kind.__name__: kind
    for kind in (
        masks.Causal,
        masks.Window,
        masks.Prefix,
        masks.PaddingLengths,
        masks.PaddingKeys,
        masks.Documents,
        masks.Dense,
        scores.SoftCap,
        scores.Alibi,
        scores.Bias,
    )
}
"""Every value a recipe can name."""

torch.serialization.add_safe_globals([masks.Full, masks.And, *KINDS.values(), Varlen])  # torch.load takes them

FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_SIZE = 256

PRECISIONS = ("ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3", "tf32")
PREFERENCE = {
    "highest": ("bf16x6", "ieee"),
    "high": ("fp16x3", "tf32x3", "bf16x6", "ieee"),
    "medium": ("tf32", "fp16x3", "tf32x3", "bf16x6", "ieee"),
}
"""What `precision=None` asks for, by torch.get_float32_matmul_precision(), best first."""


class Unsupported(NotImplementedError, ValueError):  # noqa: N818, a name that users type
    """A back end, or all of them, cannot do what was asked; the message lists why and what to do instead.

    It is a ValueError, and by NotImplementedError a RuntimeError, which callers of other attentions catch.
    """


class Operands(NamedTuple):
    """q, k, v, and every tensor that mask, score, sink and layout carry, in the order Problem names them."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor, ...]


class Saved(NamedTuple):
    """What a forward leaves: o (B, M, H, D_v), lse (B, H, M); packed: (T, H, D_v), (H, T); dropout's seed; and what the
    back end keeps for its own backward, which must also do without."""

    o: Tensor
    lse: Tensor
    seed: Tensor | None = None
    kept: tuple[Tensor, ...] = ()


class Grads(NamedTuple):
    """dq, dk, dv, and one entry or None per extra operand."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor | None, ...]

    def packed(self) -> Tensor:
        """The one tensor (..., 3, H, D) whose parts dq, dk and dv are, as `empty_parts` made them."""
        *rows, H, D = self.q.shape
        return self.q.as_strided((*rows, 3, H, D), (*self.q.stride()[:-2], H * D, D, 1))


class Recipe(NamedTuple):
    """What the caller chose, without tensors. Masks and scores are (class name, numbers...)."""

    mask: tuple[tuple[Any, ...], ...] = ()
    score: tuple[tuple[Any, ...], ...] = ()
    sink: bool = False
    varlen: bool = False
    scale: float | None = None
    dropout: float = 0.0
    precision: str | None = None
    deterministic: bool = False
    backend: str | None = None
    packed: bool = False
    """Whether q, k and v are parts of one tensor, and their gradients are to be parts of one, too."""

    def encode(self) -> str:
        """Text that `decode` reads back; only literals, so that torch.compile and torch.export can carry it."""
        return repr(tuple(self))

    @staticmethod
    @lru_cache(4096)
    def decode(text: str) -> "Recipe":
        """The recipe that `encode` wrote."""
        return Recipe(*ast.literal_eval(text))


class Spec(NamedTuple):
    """What a kernel's choice may depend on in one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    aligned: bool
    """Whether the first element lies on a 16-byte boundary."""

    @staticmethod
    def of(tensor: Tensor, real: bool = True) -> "Spec":
        """The spec of a tensor; fake and meta tensors (`real` false) have no address and count as aligned."""
        aligned = tensor.data_ptr() % 16 == 0 if real else True
        return Spec(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.stride(), aligned)


class Problem(NamedTuple):
    """One call: hashable, without tensors."""

    recipe: Recipe
    q: Spec
    k: Spec
    v: Spec
    extra: tuple[Spec, ...]
    max_q: int
    max_k: int
    target: str
    """"cpu", "sm_90", "gfx942", …"""
    matmul: str | None
    """For fp32 without a named precision: torch's setting, "highest", "high" or "medium"."""
    wanted: tuple[bool, ...] = ()
    """In a backward: which extra operands need a gradient."""

    @property
    def B(self) -> int:  # noqa: N802
        """Batch entries, or packed sequences."""
        return self.extra[-1].shape[0] - 1 if self.recipe.varlen else self.q.shape[0]

    @property
    def M(self) -> int:  # noqa: N802
        """Queries of the longest batch entry."""
        return self.max_q if self.recipe.varlen else self.q.shape[1]

    @property
    def N(self) -> int:  # noqa: N802
        """Keys of the longest batch entry."""
        return self.max_k if self.recipe.varlen else self.k.shape[1]

    @property
    def H(self) -> int:  # noqa: N802
        """Query heads."""
        return self.q.shape[-2]

    @property
    def H_k(self) -> int:  # noqa: N802
        """Key heads."""
        return self.k.shape[-2]

    @property
    def D(self) -> int:  # noqa: N802
        """Head size of q and k."""
        return self.q.shape[-1]

    @property
    def D_v(self) -> int:  # noqa: N802
        """Head size of v and o."""
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of q, k and v."""
        return self.q.dtype

    @property
    def scale(self) -> float:
        """What the logits are multiplied by."""
        return self.D**-0.5 if self.recipe.scale is None else self.recipe.scale

    @property
    def kinds(self) -> tuple[type[Value], ...]:
        """The classes of all mask parts, then of all scores."""
        return tuple(KINDS[plain[0]] for plain in self.recipe.mask + self.recipe.score)

    @property
    def past(self) -> bool:
        """Whether the mask hides every key after its query."""
        return any(hides_later_keys(part) for part in self.recipe.mask)

    @property
    def listed(self) -> bool:
        """Whether the mask is no interval, so that the tiles to visit are listed first."""
        return not all(getattr(kind, "interval", True) for kind in self.kinds)

    @property
    def biased(self) -> bool:
        """Whether logits may be as large as the entries of a bias."""
        return any(plain[0] == "Bias" for plain in self.recipe.score)

    def precision(self, available: tuple[str, ...]) -> str | None:
        """The best of `available` that honours the request; None if none does. Only for fp32."""
        asked = (self.recipe.precision,) if self.recipe.precision else PREFERENCE[self.matmul or "highest"]
        return next((name for name in asked if name in available), None)

    def values(self, extra: tuple[Tensor, ...]) -> tuple[tuple[Mask, ...], tuple[Score, ...], Tensor | None]:
        """The mask's parts, the scores and the sink, with their tensors put back."""
        tensors = iter(extra)
        built: list[Any] = []
        for name, *numbers in self.recipe.mask + self.recipe.score:
            kind = KINDS[name]
            built.append(kind.rebuild(tuple(numbers), tuple(next(tensors) for _ in kind.captures)))
        count = len(self.recipe.mask)
        return tuple(built[:count]), tuple(built[count:]), next(tensors) if self.recipe.sink else None


def hides_later_keys(part: tuple[Any, ...]) -> bool:
    """Whether a part of a recipe's mask shows no key after its query."""
    return part[0] == "Causal" or (part[0] == "Window" and part[2] == 0)


def empty_parts(p: Problem, x: Operands) -> tuple[Tensor, ...]:
    """Unwritten dq, dk and dv; parts of one tensor where q, k and v are."""
    if p.recipe.packed:
        *rows, H, D = x.q.shape
        return x.q.new_empty((*rows, 3, H, D)).unbind(-3)
    return tuple([torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x[:3]])


def matmul_setting() -> str:
    """Torch's setting for fp32 products, "highest", "high" or "medium", whichever of its two interfaces made it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # made through torch.backends.….fp32_precision, in whose words "high" is "tf32"
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


@lru_cache(64)
def target_of(device: torch.device) -> str:
    """The chip behind a device: "cpu", "sm_90", "gfx942", …; other devices by their type."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def batched_ranks(recipe: Recipe) -> tuple[int, ...]:
    """For every extra operand of padded batches, how many dimensions it has where its first is the batch."""
    ranks: list[int] = []
    for name, *_ in recipe.mask + recipe.score:
        kind = KINDS[name]
        ranks += [kind.batched] * len(kind.captures)
    return (*ranks, *[2] * recipe.sink)  # a sink (H,) has no batch
