"""Batching of the tiled algorithm: which batch entries are computed together, and views of their rows."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.operands import Operands
from ..call.problem import Problem
from ..values.masks import Mask
from ..values.score import Score

FUSED = "PyTorch's fused CPU kernel"
COLUMNS = 256
BUDGET = 1 << 19
"""Entries of one S tile: 2 MB of fp32, about the size of the cores' L2 caches."""


class Sequence(NamedTuple):
    """Batch entries of one length (often a single one) that are computed together, with their masks and scores.

    Operands are (entries * heads, length, size) in the compute type. Several entries have all their heads in one tile.
    """

    b: slice
    q: Tensor
    k: Any
    v: Any
    """Tensors, or what gives their tiles by `k[heads, columns]`."""
    masks: tuple[Mask, ...]
    scores: tuple[Score, ...]
    rows: slice
    """The positions of their queries in the packed rows; in a padded batch, `b` selects the entries."""
    columns: slice
    heads: int
    """The number of key heads computed at once."""
    shift: int
    """How far masks and scores shift a query's position: the first one's index i."""
    width: int = COLUMNS
    """The number of keys in a tile."""


def choose_tiles(p: Problem, lengths: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Return the key heads, queries and keys of one tile, for a sequence's lengths or by default the longest."""
    M, N = lengths or (p.M, p.N)
    group = p.H // p.H_k
    rows = max(16, min(256, BUDGET // (COLUMNS * group)))
    used = group * min(rows, max(16, M)) * min(COLUMNS, max(64, N))  # dropout works in blocks of 16 x 64
    return max(1, BUDGET // used), rows, COLUMNS


def sequences(p: Problem, x: Operands) -> Iterator[Sequence]:
    """Yield all batch entries or packed sequences; consecutive ones of equal lengths together, if they fit one tile."""
    kind = compute_type(p)
    masks, scores, _ = p.values(x.extra)
    ends_q, ends_k = p.recipe.layout_of(x.extra).ends(p)
    for b, count, heads in _together(p, ends_q, ends_k):
        rows, columns = (slice(ends[b], ends[b + count]) for ends in (ends_q, ends_k))
        entries = slice(b, b + count)
        q, k, v = (
            heads_first(p.layout.rows_of(t, entries, part), kind)
            for t, part in zip(x[:3], (rows, columns, columns), strict=True)
        )
        yield Sequence(entries, q, k, v, masks, scores, rows, columns, heads, k.shape[1] - q.shape[1])


def _together(p: Problem, ends_q: list[int], ends_k: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first batch entry of each group, the number of entries, and the number of key heads at once."""
    first = 0
    pairs = zip(pairwise(ends_q), pairwise(ends_k), strict=True)
    for lengths, run in groupby((i1 - i0, j1 - j0) for (i0, i1), (j0, j1) in pairs):
        heads, rows, columns = choose_tiles(p, lengths)
        most = max(1, heads // p.H_k) if lengths[0] <= rows and lengths[1] <= columns else 1
        last = first + sum(1 for _ in run)
        for b in range(first, last, most):
            yield b, min(most, last - b), heads
        first = last


def describe(p: Problem) -> str:
    """Describe the tiles of a pass."""
    heads, rows, columns = choose_tiles(p)
    return f"{rows} queries x {columns} keys, {heads} key heads at a time"


def product_type(p: Problem) -> torch.dtype:
    """Return the type whose products are exact."""
    return p.dtype


def heads_serially(s: Sequence) -> Iterator[slice]:
    """Yield the slice of key heads of each round."""
    for h in range(0, s.k.shape[0], s.heads):
        yield slice(h, min(h + s.heads, s.k.shape[0]))


def heads_first(rows: Tensor, kind: torch.dtype) -> Tensor:
    """Copy (entries, length, heads, size) to (entries * heads, length, size), in the compute type `kind`."""
    return rows.transpose(1, 2).to(kind).contiguous().flatten(0, 1)


def count_of(s: Sequence) -> int:
    return s.b.stop - s.b.start


def compute_type(p: Problem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32
