"""Plan "halo": each rank fetches the keys that its rows see into one buffer, and one call of attention computes them.

Numerical grids exchange the cells around a rank's own, their halo, in this way.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .exchange import swap
from .pieces import Pieces, meet, places
from .shards import Parts, Shards

Places = tuple[tuple[slice, ...], ...]
"""For each rank, where rows that travel to it or from it are in this rank's tensors."""


@lru_cache(32)
def routes(pieces: tuple[Pieces, ...], seen: tuple[Pieces, ...], own: int) -> tuple[Places, Places]:
    """Return where in this rank's keys those lie that each rank sees, and where in its buffer those of each owner."""
    to = tuple(tuple(places(pieces[own], meet(pieces[own], keys))) for keys in seen)
    source = tuple(tuple(places(seen[own], meet(seen[own], keys))) for keys in pieces)
    return to, source


class Halo:
    """A buffer of the keys that a rank's rows see, in the whole's order, by one all-to-all; its own do not travel.

    Gradients of the buffer go back in the type of sums, and each owner adds them up in the order of ranks.
    """

    at_once = True

    def __init__(self, s: Shards) -> None:
        self.s = s
        seen = tuple(s.pair(to, None).keys for to in range(len(s.pieces)))
        self.to, self.source = routes(s.pieces, seen, s.own)

    def sources(self, *keys: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...], Parts]]:
        """Yield the buffer, () for no keys."""
        found = sorted(self._exchange(keys, keys, self.to, self.source), key=lambda one: one[0].start)
        whole = tuple(torch.cat(parts, 1) for parts in zip(*[parts for _, parts in found], strict=True))
        del found
        yield self.s.own, whole, self.s.pair(self.s.own, None)

    def give_back(self, to: int, keys: Pieces, grads: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        """Add to `totals` the gradients of this rank's keys, from all ranks that see them."""
        for at, parts in self._exchange(grads, totals, self.source, self.to):
            for total, part in zip(totals, parts, strict=True):
                total[:, at] += part

    def finish(self, totals: tuple[Tensor, ...]) -> None:
        """Do nothing: there is one source."""

    def _exchange(
        self, tensors: Sequence[Tensor], like: Sequence[Tensor], away: Places, home: Places
    ) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Send the rows `away` of tensors (B, rows, H_k, D); yield the places `home`, each with the rows for it."""
        own, sizes = self.s.own, [t.shape[0] * t.shape[2] * t.shape[3] for t in like]
        to, source = (_without(own, places) for places in (away, home))
        sent, got = ([sum(map(_rows, each)) * sum(sizes) for each in places] for places in (to, source))
        rows = [t[:, at].reshape(-1) for each in to for at in each for t in tensors]
        flat = swap(torch.cat([like[0].new_empty(0), *rows]), sent, got, self.s.axis)
        del rows
        parts = iter(flat.split([_rows(at) * size for each in source for at in each for size in sizes]))
        for rank, each in enumerate(home):
            for at, kept in zip(each, away[own] if rank == own else each, strict=True):
                if rank == own:
                    yield at, tuple(t[:, kept] for t in tensors)
                else:
                    yield at, tuple(next(parts).view(t.shape[0], _rows(at), *t.shape[2:]) for t in like)


def _without(rank: int, places: Places) -> Places:
    """Return places of which a rank has none."""
    return (*places[:rank], (), *places[rank + 1 :])


def _rows(at: slice) -> int:
    return at.stop - at.start
