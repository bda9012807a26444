"""64 masks and scores as plain Python functions, each with the tensors that it captures, for one small problem.

A function takes its captured tensors as its last parameters. `Example.closed` is the same function with the tensors in
a closure. Most are what papers and FlexAttention's users write; a few are there for an operation.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812, as everybody
from torch import Tensor

B, H, M, N = 2, 3, 13, 17
SIDE = 4
"""The width of the image that rows and keys are, in two dimensions."""


class Example(NamedTuple):
    """A function, and what it captures; captured tensors that learn require a gradient."""

    what: str
    fn: Callable[..., Any]
    tensors: tuple[Tensor, ...]

    @property
    def closed(self) -> Callable[..., Any]:
        """Return the function of the indices alone."""
        fn, tensors = self.fn, self.tensors
        if self.what == "mask":
            return lambda b, h, i, j: fn(b, h, i, j, *tensors)
        return lambda s, b, h, i, j: fn(s, b, h, i, j, *tensors)

    def to(self, real: torch.dtype) -> "Example":
        """Return the example with its floating tensors in another type; those that learn are leaves again."""
        moved = [
            t.detach().to(real).requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in self.tensors
        ]
        return Example(self.what, self.fn, tuple(moved))


SCORES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
MASKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}


def score(*names: str) -> Callable[..., Any]:
    """Add a score to the list, with the names of its captured tensors."""
    return lambda fn: SCORES.setdefault(fn.__name__, (fn, names))[0]


def mask(*names: str) -> Callable[..., Any]:
    """Add a mask to the list."""
    return lambda fn: MASKS.setdefault(fn.__name__, (fn, names))[0]


def tensors() -> dict[str, Tensor]:
    """Return all captured tensors, by name. Those with floating numbers learn, unless the name begins with `fixed`."""
    draw = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def whole(most: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, most, shape, generator=draw).to(dtype)

    ids = torch.arange(N).mul(3).div(N, rounding_mode="floor")
    found = {
        "table": real(H, M + N - 1), "buckets": real(H, 32), "distances": real(M + N - 1), "by_head": real(H),
        "also_by_head": real(H), "spatial": real(H, 5), "edges": real(H, 3, 4), "by_key": real(B, N),
        "scale": torch.tensor(1.3), "gates": real(B, H, N), "rows": real(B, H, M), "bias": real(B, H, M, N),
        "positive": real(B, N).exp(), "image": real(H, 9, 9), "half": real(H, N).half(),
        "transposed": real(N, H).t(), "expanded": real(H, 1).expand(H, N), "fixed_slopes": real(H).abs(),
        "bins": whole(5, B, M, N, dtype=torch.int32), "paths": whole(4, B, M, N, 3), "hops": whole(4, B, M, N),
        "doc": ids.expand(B, N).int(), "starts": (ids * N // 3).int(), "lengths": torch.tensor([9, 15]),
        "prefix": torch.tensor([4, 8], dtype=torch.int32), "small": whole(100, B, N, dtype=torch.int8),
        "noise": whole(2, B, H, M, N).bool(), "is_global": torch.arange(N) % 8 == 0, "tree": whole(2, N, N).bool(),
        "blocks": whole(2, B, H, 4, 5).bool(), "fixed_noise": torch.rand(M, N, generator=draw),
        "images": torch.arange(M) // 4, "owner": torch.arange(N) // 6, "offset": torch.tensor(3),
    }  # fmt: skip
    for name, t in found.items():
        t.requires_grad_(t.is_floating_point() and not name.startswith("fixed"))
    return found


def examples() -> dict[str, Example]:
    """Return all examples, by name; scores come first."""
    found = tensors()
    return {
        name: Example(what, fn, tuple([found[of] for of in names]))
        for what, group in (("score", SCORES), ("mask", MASKS))
        for name, (fn, names) in group.items()
    }


@score()
def unchanged(s, b, h, i, j):
    return s


@score()
def alibi(s, b, h, i, j):
    return s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H))


@score("by_head")
def alibi_learned(s, b, h, i, j, slopes):
    return s - slopes[h] * abs(i - j)


@score("fixed_slopes")
def alibi_fixed(s, b, h, i, j, slopes):
    return s - slopes[h] * (i - j).abs()


@score()
def softcap(s, b, h, i, j):
    return 2.0 * torch.tanh(s / 2.0)


@score("table")
def relative(s, b, h, i, j, table):
    return s + table[h, i - j + N - 1]


@score("table", "by_head")
def relative_from_the_end(s, b, h, i, j, table, tau):
    return s + table[h, -1 - (i - j).abs()] * tau[-1]


@score("buckets")
def t5(s, b, h, i, j, table):
    n = (i - j).abs()
    far = 8 + (torch.log(n.clamp(min=1).float() / 8) / math.log(128 / 8) * 8).to(torch.int32)
    return s + table[h, torch.where(n < 8, n, far.clamp(max=15)) + torch.where(j > i, 16, 0)]


@score("distances", "by_head")
def sandwich(s, b, h, i, j, distances, ratio):
    return s + distances[i - j + N - 1] * ratio[h]


@score()
def gelu(s, b, h, i, j):
    return torch.log(F.gelu(s) + 1.0)


@score()
def gelu_by_tanh(s, b, h, i, j):
    return F.gelu(s, approximate="tanh")


@score()
def relu(s, b, h, i, j):
    return torch.log(F.relu(s) + 1.0)


@score("spatial", "bins")
def graphormer(s, b, h, i, j, spatial, bins):
    return s + spatial[h, bins[b, i, j]]


@score("edges", "paths", "hops")
def graphormer_edges(s, b, h, i, j, edges, paths, hops):
    length, total = hops[b, i, j], 0.0
    for n in range(3):
        total = total + torch.where(length > n, edges[h, n, paths[b, i, j, n]], 0.0)
    return s + total / torch.clamp(length, min=1)


@score("by_key")
def one_bias_twice(s, b, h, i, j, bias):
    return s + bias[b, i] * bias[b, j]


@score("by_head", "scale")
def temperature(s, b, h, i, j, tau, scale):
    return scale * (s * tau[h])


@score("gates")
def forgetting(s, b, h, i, j, gates):
    return s + torch.where(j <= i, gates[b, h, i] - gates[b, h, j], 0.0)


@score("by_head")
def kerple(s, b, h, i, j, decay):
    return s - F.softplus(decay[h]) * torch.log1p((i - j).abs())


@score()
def checkers(s, b, h, i, j):
    return torch.where((i - j) % 2 == 0, s, s * torch.sigmoid(s))


@score("by_head", "also_by_head")
def fire(s, b, h, i, j, outer, inner):
    rate = inner[h].abs() + 0.1
    ratio = torch.log1p(rate * (i - j).abs()) / torch.log1p(rate * i.clamp(min=4))
    return s + outer[h] * torch.sigmoid(ratio)


@score()
def causal_as_score(s, b, h, i, j):
    return torch.where(i >= j, s, -float("inf"))


@score("noise")
def hidden_at_random(s, b, h, i, j, noise):
    return s.masked_fill(noise[b, h, i, j], -math.inf)


@score("doc")
def far_documents(s, b, h, i, j, doc):
    return torch.where(doc[b, i] == doc[b, j], s, s * 0.5)


@score("rows")
def gated(s, b, h, i, j, rows):
    return s * F.silu(rows[b, h, i])


@score("by_head", "also_by_head")
def waves(s, b, h, i, j, amplitude, frequency):
    angle = frequency[h] * (i - j)
    return s + amplitude[h] * torch.cos(angle) + torch.sin(angle) / 3


@score("image")
def swin(s, b, h, i, j, image):
    return s + image[h, i // SIDE - j // SIDE + 4, i % SIDE - j % SIDE + 4]


@score("lengths")
def log_of_length(s, b, h, i, j, lengths):
    return s * torch.log(lengths[b]) / math.log(16)


@score("positive")
def log_of_weight(s, b, h, i, j, weight):
    return s + torch.log2(weight[b, j]) - weight[b, j].log()


@score()
def elu(s, b, h, i, j):
    return F.elu(s, alpha=1.5)


@score()
def softplus_and_mish(s, b, h, i, j):
    return F.softplus(s, beta=2) + F.mish(s)


@score()
def hard(s, b, h, i, j):
    return F.hardtanh(s) + F.relu6(s * 4) + F.leaky_relu(s, 0.2) + s.clamp(-0.5, 1.5)


@score()
def saturated(s, b, h, i, j):
    return s * torch.rsqrt(1 + s.square()) + torch.sqrt(s.abs() + 1) - torch.erf(s)


@score("by_head")
def decay_by_distance(s, b, h, i, j, rate):
    return s * torch.exp2(-((i - j).abs() * torch.exp(rate[h]))) + torch.expm1(s / 4)


@score()
def bits(s, b, h, i, j):
    return s + ((i ^ j) & 7) * 0.125 - ((1 << (h & 3)) | (i >> 1)) / 8


@score("table", "bias")
def two_tables(s, b, h, i, j, table, bias):
    return torch.lerp(s, table[h, i + j], 0.25) + bias[b, h, i, j]


@score("half", "small", "offset")
def narrow_types(s, b, h, i, j, half, small, offset):
    return s + half[h, j] + small[b, j] / 64 + half[h, (j + offset) % N]


@score("transposed", "expanded")
def strides(s, b, h, i, j, transposed, expanded):
    return s + transposed[h, j] * expanded[h, i]


@score("positive", "by_head")
def powers(s, b, h, i, j, weight, exponent):
    return s**3 / 8 + weight[b, j] ** exponent[h] + 2.0 ** exponent[h] + weight[b, i] ** -2 + weight[b, j] ** 0.5


@score("by_head", "by_key")
def extremes(s, b, h, i, j, low, high):
    return torch.maximum(torch.minimum(s, high[b, j]), low[h] - 1)


@mask()
def causal(b, h, i, j):
    return i >= j


@mask()
def window(b, h, i, j):
    return (i >= j) & (i - j <= 5)


@mask("prefix")
def prefix_lm(b, h, i, j, prefix):
    return (j < prefix[b]) | (i >= j)


@mask("doc")
def document(b, h, i, j, doc):
    return doc[b, i] == doc[b, j]


@mask("starts")
def document_causal(b, h, i, j, starts):
    return (j >= starts[i]) & (i >= j)


@mask()
def dilated(b, h, i, j):
    return ((i - j).abs() <= 6) & ((i - j) % 2 == 0)


@mask()
def natten(b, h, i, j):
    x, y = (i // SIDE).clamp(1, SIDE - 2), (i % SIDE).clamp(1, SIDE - 2)
    return ((x - j // SIDE).abs() <= 1) & ((y - j % SIDE).abs() <= 1)


@mask()
def sliding_tiles(b, h, i, j):
    x, y = i // 2 // SIDE, i // 2 % SIDE
    return ((x - j // 2 // SIDE).abs() <= 1) & ((y - j // 2 % SIDE).abs() <= 1)


@mask()
def block_diffusion(b, h, i, j):
    noised_i, noised_j = i < 8, j < 8
    block_i, block_j = (i % 8) // 2, (j % 8) // 2
    own = (block_i == block_j) & (noised_i == noised_j)
    return own | ((block_i > block_j) & noised_i & ~noised_j) | ((block_i >= block_j) & ~noised_i & ~noised_j)


@mask("is_global")
def longformer(b, h, i, j, is_global):
    return ((i - j).abs() <= 2) | is_global[i] | is_global[j]


@mask()
def window_per_head(b, h, i, j):
    return (i >= j) & (i - j < (h + 1) * 4)


@mask()
def sinks_and_window(b, h, i, j):
    return (i >= j) & ((j < 2) | (i - j < 4))


@mask("lengths")
def padding(b, h, i, j, lengths):
    return j < lengths[b]


@mask("lengths")
def padding_of_both(b, h, i, j, lengths):
    return torch.logical_and(j < lengths[b], i < lengths[b])


@mask("prefix")
def shared_prefix(b, h, i, j, prefix):
    return (j < prefix[0]) | ((i >= j) & (i // 6 == j // 6))


@mask("tree")
def token_tree(b, h, i, j, tree):
    return (i >= j) & ((j < 3) | tree[i, j])


@mask("images", "owner")
def flamingo(b, h, i, j, images, owner):
    return images[i] == owner[j]


@mask("blocks")
def listed_blocks(b, h, i, j, blocks):
    return blocks[b, h, i // 4, j // 4]


@mask()
def stripes(b, h, i, j):
    return ((j - i) % 5 == 0) | (j // 3 == i // 3)


@mask("fixed_noise")
def random_keys(b, h, i, j, noise):
    return (noise[i, j] < 0.3) | (i == j)


@mask()
def not_near(b, h, i, j):
    return ~((i - j).abs() < 3)


@mask()
def sloped(b, h, i, j):
    return 3 * j <= 2 * i + 4


@mask()
def direction_by_head(b, h, i, j):
    return torch.where(h % 2 == 0, i >= j, i <= j)


@mask()
def odd_bits(b, h, i, j):
    return (((i ^ j) >> h) & 1).bool() ^ (-j + i > 2)


@mask()
def everything(b, h, i, j):
    return True


@mask("noise")
def counted(b, h, i, j, noise):
    return noise[b, h, i, j].int() + (i >= j).int() + (j < 4).long() >= 2
