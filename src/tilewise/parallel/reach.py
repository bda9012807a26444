"""What rows of the whole see, from a mask's numbers: intervals of keys, found on the host once for equal numbers."""

from functools import lru_cache, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..values.intervals import Causal, PaddingKeys, PaddingLengths, PaddingRange, Prefix, Spans, Window
from ..values.masks import Mask
from ..values.tables import Documents
from .held import Numbers, held

Ends = tuple[Tensor | None, Tensor | None]
"""First keys and ends, int64, broadcast to (B, N); None for no bound."""


class Reach(NamedTuple):
    """The keys that rows of a sequence of N see, as a hull: row i sees no key before first(i), and none from end(i) on.

    lo and hi: the band lo <= j - i <= hi. starts and ends: (N,) over all batch entries, never decreasing, or None.
    """

    N: int
    lo: int | None
    hi: int | None
    starts: Tensor | None
    ends: Tensor | None
    each: tuple[Tensor, Tensor] | None
    """Without the band: first keys and ends by batch entry; None where the band says everything."""
    exact: bool
    """Whether every key between first and end is seen by some batch entry."""

    def first(self, i: int) -> int:
        """Return the first key that row i may see."""
        start = 0 if self.starts is None else int(self.starts[i])
        return start if self.lo is None else max(start, i + self.lo)

    def end(self, i: int) -> int:
        """Return the key behind the last that row i may see."""
        end = self.N if self.ends is None else int(self.ends[i])
        return end if self.hi is None else min(end, i + self.hi + 1)

    def covers(self, i0: int, i1: int, j0: int, j1: int) -> bool:
        """Tell whether all of the rows see all of the keys, in every batch entry."""
        band = (self.lo is None or j0 - (i1 - 1) >= self.lo) and (self.hi is None or j1 - 1 - i0 <= self.hi)
        if not (self.exact and band) or self.each is None:
            return self.exact and band
        starts, ends = self.each
        return int(starts[:, i0:i1].max()) <= j0 and j1 <= int(ends[:, i0:i1].min())

    def intervals(self) -> tuple[Tensor, Tensor]:
        """Return the first keys and ends of rows, int64 (B, N) by batch entry, or (1, N) where all are alike."""
        i = torch.arange(self.N)[None]
        lo = torch.zeros_like(i) if self.lo is None else (i + self.lo).clamp(min=0)
        hi = torch.full_like(i, self.N) if self.hi is None else (i + self.hi + 1).clamp(max=self.N)
        return (lo, hi) if self.each is None else (torch.maximum(self.each[0], lo), torch.minimum(self.each[1], hi))

    def counts(self) -> Tensor:
        """Return how many keys each row sees, (N,) fp64, the mean over batch entries."""
        first, end = self.intervals()
        return (end - first).clamp(min=0).double().mean(0)


def reach_of(mask: Mask, N: int) -> Reach:
    """Return what rows of N see. Tensors of the mask are read: that synchronises with a GPU."""
    return reach(held(mask), len(mask.parts), N)


@lru_cache(8)
def reach(numbers: Numbers, parts: int, N: int) -> Reach:
    """Return what rows of N see of a mask of so many parts, as far as it was read."""
    lows, highs, bounds, exact = [], [], [], len(numbers) == parts
    for part in [one.part for one in numbers]:
        if isinstance(part, (Causal, Window)):
            lo, hi = _band(part)
            lows += [] if lo is None else [lo]
            highs += [] if hi is None else [hi]
        else:
            starts, ends, one_run = _ends(part, N)
            bounds.append((starts, ends))
            exact = exact and one_run
    band = max(lows) if lows else None, min(highs) if highs else None
    if not any(end is not None for pair in bounds for end in pair):
        return Reach(N, *band, None, None, None, exact)
    starts, ends = torch.zeros(1, N, dtype=torch.int64), torch.full((1, N), N)
    for start, end in bounds:
        starts = starts if start is None else torch.maximum(starts, start)
        ends = ends if end is None else torch.minimum(ends, end)
    starts, ends = torch.broadcast_tensors(starts, ends)
    empty = starts >= ends
    low, high = starts.masked_fill(empty, N).amin(0), ends.masked_fill(empty, 0).amax(0)
    low = low.flip(0).cummin(0)[0].flip(0)  # hulls that never move left, for ids in any order, too
    return Reach(N, *band, low, high.cummax(0)[0], (starts, ends), exact)


def _band(part: Causal | Window) -> tuple[int | None, int | None]:
    if isinstance(part, Causal):
        return None, 0
    return None if part.left is None else -part.left, part.right


@singledispatch
def _ends(part: Any, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return first keys and ends of a mask, and whether all keys between are seen. By default, any may be."""
    return None, None, False


@_ends.register
def _(part: Documents, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    rows, (ids, order) = part.q_ids.long(), part.k_ids.long().sort(dim=1, stable=True)
    rows = rows.contiguous()
    low, high = torch.searchsorted(ids, rows), torch.searchsorted(ids, rows, right=True)
    starts = order.gather(1, low.clamp(max=N - 1))
    ends = torch.where(low < high, order.gather(1, (high - 1).clamp(min=0)) + 1, starts)
    return starts, ends, bool((ends - starts == high - low).all())


@_ends.register
def _(part: PaddingLengths, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    return None, part.lengths.long()[:, None], True


@_ends.register
def _(part: PaddingRange, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    return part.starts.long()[:, None], part.lengths.long()[:, None], True


@_ends.register
def _(part: PaddingKeys, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    real, j = part.real, torch.arange(N)
    starts = torch.where(real, j, N).amin(1, keepdim=True)
    return starts, torch.where(real, j + 1, 0).amax(1, keepdim=True), False


@_ends.register
def _(part: Prefix, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    return None, torch.maximum(part.lengths.long()[:, None], torch.arange(1, N + 1)), True


@_ends.register
def _(part: Spans, N: int) -> tuple[Tensor | None, Tensor | None, bool]:
    return part.lo.long(), part.hi.long(), True
