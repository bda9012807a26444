"""Strips: queries, and the keys that they see. PyTorch's kernel takes one at a time.

Under a mask, neighbors are joined as long as that adds few entries.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.operands import Operands
from ..call.problem import Problem
from ..program import Entries
from ..values.masks import Mask
from .sequences import COLUMNS, compute_type
from .tiled import possible_and_certain

ROWS, MOST_ROWS, MOST_ENTRIES = 256, 1024, 1 << 23
"""Queries of a strip under a mask, before any are joined and at most; entries of the mask of joined ones, at most."""
FEWEST = 1 << 16
"""Logits in fp32 whose mask is worth it: with fewer, a call takes as long as Python does."""
FEW = 1 << 18
"""Logits of a head that are not searched for what the mask hides: that would take as long as a quarter of them."""
SLACK = 1.25
"""How many times the entries of strips those of the joined strip may be."""
FASTER = {torch.bfloat16: 4.0}
"""How many entries the kernel computes while tiles compute one, if not 1.5: where a mask leaves fewer, tiles do it."""
MINUS_INFINITY = {
    torch.bfloat16: (torch.int16, -1 << 7), torch.float16: (torch.int16, -1 << 10),
    torch.float32: (torch.int32, -1 << 23), torch.float64: (torch.int64, -1 << 52),
}  # fmt: skip
"""Its bits, as an integer of a type. Masks become numbers by them 10 times as fast as by torch.where."""


class Strip(NamedTuple):
    """Queries and keys of one call of the kernel."""

    rows: slice
    keys: slice
    causal: bool = False
    keep: Tensor | None = None
    """The mask, (B or 1, H or 1, rows or 1, keys); None if it hides nothing."""
    added: Tensor | None = None
    """What is added to the logits."""


def plain(p: Problem) -> bool:
    """Tell whether nothing is added to the logits: the kernel knows the square causal mask; one query sees all."""
    return not p.recipe.score and (not p.recipe.mask or (p.recipe.mask == (("Causal",),) and p.M in (1, p.N)))


def strips(p: Problem, x: Operands, most: tuple[int, int]) -> Iterator[Strip]:
    """Yield strips that cover a call, of so many queries and keys at most; none where tiles are faster."""
    causal = bool(p.recipe.mask) and p.M > 1
    if plain(p):
        for i0 in range(0, p.M, most[0]):
            rows = slice(i0, min(i0 + most[0], p.M))
            yield from (Strip(rows, keys) for keys in _cut(slice(0, i0 if causal else p.N), most[1]))
            if causal:
                yield Strip(rows, rows, True)
        return
    masks, scores, _ = p.values(x.extra)
    bias = scores[0].captured[0] if scores else None
    for rows, seen, whole in _seen(p, masks):
        for keys in _cut(seen, most[1]):
            mask = _mask if p.extra or _area((rows, keys, whole)) > FEW else kept
            keep, hidden = (None, None) if whole else mask(p, masks, rows.start, rows.stop, keys.start, keys.stop)
            yield Strip(rows, keys, False, keep, _added(p, hidden, bias, rows, keys))


def _cut(whole: slice, most: int) -> Iterator[slice]:
    """Cut a slice into parts of so many."""
    return (slice(i, min(i + most, whole.stop)) for i in range(whole.start, whole.stop, most))


def _seen(p: Problem, masks: Sequence[Mask]) -> list[tuple[slice, slice, bool]]:
    """Return queries, the first to the last key that they may see, and whether they see all of these."""
    if not masks:
        return [(rows, slice(0, p.N), True) for rows in _cut(slice(0, p.M), MOST_ROWS)]
    if p.M <= MOST_ROWS and p.M * p.N <= FEW:
        return [(slice(0, p.M), slice(0, p.N), False)]
    possible, certain = possible_and_certain(masks, (p.B, p.H, p.M, p.N, ROWS, COLUMNS), p.N - p.M)
    some, every = possible.flatten(0, 1).any(0).tolist(), certain.flatten(0, 1).all(0).tolist()
    found: list[tuple[slice, slice, bool]] = []
    areas: list[int] = []
    for rows, tiles, whole in zip(_cut(slice(0, p.M), ROWS), some, every, strict=True):
        at = [n for n, one in enumerate(tiles) if one] or [0]
        keys = slice(at[0] * COLUMNS, min(p.N, at[-1] * COLUMNS + COLUMNS))
        new = rows, keys, all(whole[at[0] : at[-1] + 1])
        joined = _joined(found[-1], new) if found else None
        own = _area(new) + (areas[-1] if joined else 0)
        if joined and _area(joined) <= min(SLACK * own, MOST_ENTRIES / len(possible)):
            found[-1], areas[-1] = joined, own
        else:
            found.append(new)
            areas.append(_area(new))
    worth = FASTER.get(p.dtype, 1.5) * ROWS * COLUMNS * sum(map(sum, some))
    return found if sum(map(_area, found)) <= max(worth, ROWS * COLUMNS) else []


def _area(strip: tuple[slice, slice, bool]) -> int:
    rows, keys, _ = strip
    return (rows.stop - rows.start) * (keys.stop - keys.start)


def _joined(one: tuple[slice, slice, bool], other: tuple[slice, slice, bool]) -> tuple[slice, slice, bool] | None:
    """Return two neighbors as one strip, or None where that has too many queries."""
    rows = slice(one[0].start, other[0].stop)
    keys = slice(min(one[1].start, other[1].start), max(one[1].stop, other[1].stop))
    whole = one[2] and other[2] and one[1] == other[1]
    return (rows, keys, whole) if rows.stop - rows.start <= MOST_ROWS else None


def _mask(p: Problem, masks: Sequence[Mask], i0: int, i1: int, j0: int, j1: int) -> tuple[Tensor, Tensor]:
    """Return a strip's mask, and as numbers to add."""
    at = Entries.at((slice(0, p.B), slice(0, p.H), slice(i0, i1), slice(j0, j1)), p.N - p.M)
    keep = reduce(torch.logical_and, [mask.keep(at) for mask in masks])
    keep = keep[(None,) * (4 - keep.ndim)].expand(*[-1] * 3, j1 - j0)
    kind, bits = MINUS_INFINITY[p.dtype]
    return keep, keep.to(kind).sub_(1).bitwise_and_(bits).view(p.dtype)


kept = lru_cache(16)(_mask)
"""The same of small masks that are numbers alone."""


def _added(p: Problem, hidden: Tensor | None, bias: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """Return what a mask and a bias add to a strip's logits."""
    if bias is None:
        return hidden
    bias = bias[(None,) * (4 - bias.ndim)]
    bias = bias.expand(*bias.shape[:3], p.N)[:, :, rows if bias.shape[2] > 1 else slice(None), keys]
    bias = bias.to(p.dtype if bias.dtype == p.dtype else compute_type(p))
    return bias if hidden is None else hidden + bias
