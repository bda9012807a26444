"""What rows of the whole see, from a mask's numbers: intervals of keys, found on the host once for equal numbers."""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ..program import Aligned, run
from ..program.bounds import Grid, tiles
from ..program.shape import shape
from ..values.intervals import PaddingKeys
from ..values.masks import Mask
from ..values.of import MaskOf
from ..values.tables import Documents
from .held import Numbers, held
from .pieces import Box, Piece, Pieces

Ends = tuple[Tensor, Tensor]
"""First keys and ends of rows, int64."""
Bounds = tuple[Tensor, Tensor, bool]
"""First keys and ends of rows, and whether all keys between are visible."""
TILES = 1 << 20
"""About how many tiles are asked whether a row of them may see a key, where rows are no intervals."""


class Reach(NamedTuple):
    """The keys that rows of a sequence of N see, as a hull: row i sees no key before first(i), and none from end(i) on.

    lo and hi: the band lo <= j - i <= hi.
    """

    N: int
    lo: int
    hi: int
    hull: Ends | None
    """Without the band: those of all batch entries (N,), never decreasing; None where the band says everything."""
    each: Ends | None
    """Without the band: those of each batch entry, (B, N)."""
    exact: bool
    """Whether every key between first and end is visible in some batch entry."""

    def first(self, i: int) -> int:
        """Return the first key that row i may see."""
        return max(i + self.lo, 0 if self.hull is None else int(self.hull[0][i]))

    def end(self, i: int) -> int:
        """Return the key behind the last that row i may see."""
        return min(i + self.hi + 1, self.N if self.hull is None else int(self.hull[1][i]))

    def box(self, rows: Piece, keys: Piece) -> Box | None:
        """Return the bounding box of what rows see of keys, None if they see nothing.

        Neither first nor end ever moves left. The last row of the box sees its last key, so that a band in it is a
        Window aligned there (both sides >= 0).
        """
        (a0, a1), (b0, b1) = rows, keys
        i0 = a0 + bisect_right(range(a0, a1), b0, key=self.end)
        i1 = i0 + bisect_left(range(i0, a1), b1, key=self.first)
        if i0 >= i1:
            return None
        j0, j1 = max(b0, self.first(i0)), min(b1, self.end(i1 - 1))
        return (i0, i1, j0, j1) if j0 < j1 else None

    def covers(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Tell whether all of the rows see all of the keys, in every batch entry."""
        if not (self.exact and j0 - (i1 - 1) >= self.lo and j1 - 1 - i0 <= self.hi):
            return False
        if self.each is None:
            return True
        starts, ends = self.each
        return int(starts[:, i0:i1].max()) <= j0 and j1 <= int(ends[:, i0:i1].min())

    def intervals(self) -> Ends:
        """Return the first keys and ends of rows, int64 (B, N) by batch entry, or (1, N) where all are alike."""
        i = torch.arange(self.N)[None]
        starts, ends = (i + self.lo).clamp(min=0), (i + self.hi + 1).clamp(max=self.N)
        if self.each is None:
            return starts, ends
        return torch.maximum(self.each[0], starts), torch.minimum(self.each[1], ends)

    def counts(self) -> Tensor:
        """Return how many keys each row sees, (N,) fp64, the mean over batch entries."""
        starts, ends = self.intervals()
        return (ends - starts).clamp(min=0).double().mean(0)

    def work(self, pieces: tuple[Pieces, ...]) -> list[float]:
        """Return the entries of P that each rank computes, a batch entry and head."""
        counts = self.counts()
        return [float(sum(counts[a:b].sum() for a, b in own)) for own in pieces]


def reach_of(mask: Mask, N: int, B: int = 0, H: int = 0) -> Reach:
    """Return what rows of N see. Tensors of the mask are read: that synchronises with a GPU.

    B and H: how many batch entries and heads there are, of which a function may read; 0 for what its tensors say.
    """
    return reach(held(mask), len(mask.parts), N, B, H)


@lru_cache(8)
def reach(numbers: Numbers, parts: int, N: int, B: int = 0, H: int = 0) -> Reach:
    """Return what rows of N see of a mask of so many parts, as far as it was read."""
    lo, hi, exact, bounds = -N, N, len(numbers) == parts, []
    for part in [one.part for one in numbers]:
        if part.interval and not part.captures and not isinstance(part, MaskOf):  # a band, such as Causal
            first, behind = part.keys(0)
            lo, hi = max(lo, first), min(hi, behind - 1)
        elif found := _bounds(part, N, B, H):
            start, end, one_run = found
            bounds.append((start, end))
            exact = exact and one_run
        else:
            exact = False
    if not bounds:
        return Reach(N, lo, hi, None, None, exact)
    starts, ends = torch.zeros(1, N, dtype=torch.int64), torch.full((1, N), N)
    for start, end in bounds:
        starts, ends = torch.maximum(starts, start), torch.minimum(ends, end)
    starts, ends = torch.broadcast_tensors(starts, ends)
    empty = starts >= ends
    low, high = starts.masked_fill(empty, N).amin(0), ends.masked_fill(empty, 0).amax(0)
    low = low.flip(0).cummin(0)[0].flip(0)  # hulls that never move left, for ids in any order, too
    return Reach(N, lo, hi, (low, high.cummax(0)[0]), (starts, ends), exact)


def _bounds(part: Mask, N: int, B: int, H: int) -> Bounds | None:
    """Return first keys and ends, which broadcast to (B, N), and whether all keys between are visible; None if any key
    may be."""
    if isinstance(part, Documents):
        return _bounds_of_documents(part, N)
    if isinstance(part, PaddingKeys):
        real, j = part.real, torch.arange(N)
        starts = torch.where(real, j, N).amin(1, keepdim=True)
        return starts, torch.where(real, j + 1, 0).amax(1, keepdim=True), False
    if not (N and (isinstance(part, MaskOf) or hasattr(part, "rule"))):
        return None
    sizes = B or _least(part, "B"), H or _least(part, "H")
    return _bounds_of_rows(part.traced, N, *sizes) or _bounds_of_tiles(part.traced, N, *sizes)


def _least(part: Mask, size: str) -> int:
    """Return how many batch entries or heads a mask's tensors have, at least 1."""
    found = [
        n
        for t, shape in zip(part.tensors, part.shapes, strict=True)
        for n, c in zip(t.shape, shape, strict=False)
        if c == size
    ]
    return min(found, default=1)


def _bounds_of_rows(mask: Aligned, N: int, B: int, H: int) -> Bounds | None:
    """Return the same where the keys of a row are intervals that follow from the mask's text; else None."""
    program, tensors, numbers, _ = mask
    ends = shape(program.text).ends
    if ends is None:
        return None
    reads = frozenset().union(*[ends.reads[n] for n in ends.outputs])
    b, h, i = torch.arange(B if "b" in reads else 1), torch.arange(H if "h" in reads else 1), torch.arange(N)
    inputs = {"b": b[:, None, None], "h": h[:, None], "i": i, "shift": i.new_zeros(())}
    found = [end.clamp(0, N).expand(len(b), len(h), N) for end in run(ends, inputs, tensors, numbers)]
    if len(found) == 2 and len(h) == 1:
        return found[0][:, 0], found[1][:, 0], True
    starts, behind = torch.stack(found[::2]), torch.stack(found[1::2])  # (intervals, B or 1, H or 1, N)
    empty = starts >= behind
    return starts.masked_fill(empty, N).amin((0, 2)), behind.masked_fill(empty, 0).amax((0, 2)), False


def _bounds_of_tiles(mask: Aligned, N: int, B: int, H: int) -> Bounds:
    """Return the same from bounds of tiles."""
    program, tensors, numbers, _ = mask
    size = max(1, -(-N // isqrt(TILES // (B * H) or 1)))
    seen = tiles(program, tensors, numbers, Grid(B, H, N, N, size, size))[0].any(1)  # (B or 1, rows, keys)
    j = torch.arange(0, N, size)
    starts, behind = torch.where(seen, j, N).amin(2), torch.where(seen, j + size, 0).amax(2)
    starts, behind = [end.repeat_interleave(size, 1)[:, :N].clamp(max=N) for end in (starts, behind)]
    return starts, behind, False


def _bounds_of_documents(part: Documents, N: int) -> Bounds:
    rows, (ids, order) = part.q_ids.long().contiguous(), part.k_ids.long().sort(dim=1, stable=True)
    low, high = torch.searchsorted(ids, rows), torch.searchsorted(ids, rows, right=True)
    starts = order.gather(1, low.clamp(max=N - 1))
    ends = torch.where(low < high, order.gather(1, (high - 1).clamp(min=0)) + 1, starts)
    return starts, ends, bool((ends - starts == high - low).all())
