"""Which batch entries the tiled algorithm computes together, and views of their rows."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..mask import Mask
from ..problem import Operands, Problem
from ..score import Score

COLUMNS = 256
BUDGET = 1 << 19
"""Entries of one S tile: 2 MB of fp32, about what the cores' second-level caches hold."""


class Sequence(NamedTuple):
    """Batch entries of one length, mostly just one: their operands as (entries * heads, length, size) in the type
    computed in, and their own masks and scores. If there are several, all their heads are in one tile; the slice of
    heads then goes past the end of what has one dimension of heads only, and means all of it."""

    b: slice
    q: Tensor
    k: Tensor
    v: Tensor
    masks: list[Mask]
    scores: list[Score]
    rows: slice
    """Where their queries are: in the batch (entries b) or in the packed rows."""
    columns: slice
    heads: int
    """How many key heads are computed at once."""


def choose_tiles(p: Problem, lengths: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Key heads, queries and keys of one tile, by the lengths of a sequence, else those of the longest."""
    M, N = lengths or (p.M, p.N)
    group = p.H // p.H_k
    rows = max(16, min(256, BUDGET // (COLUMNS * group)))
    used = group * min(rows, max(16, M)) * min(COLUMNS, max(64, N))  # 16 x 64: one counter of dropout serves as many
    return max(1, BUDGET // used), rows, COLUMNS


def sequences(p: Problem, x: Operands) -> Iterator[Sequence]:
    """All batch entries or packed sequences, neighbours of one length together where they fit one tile."""
    kind = compute_type(p)
    masks, scores, _ = p.values(x.extra)
    if p.recipe.varlen:
        ends_q, ends_k = (cu.tolist() for cu in x.extra[-2:])
    else:
        ends_q, ends_k = ([b * length for b in range(p.B + 1)] for length in (p.M, p.N))
    for b, count, heads in _together(p, ends_q, ends_k):
        rows, columns = (slice(ends[b], ends[b + count]) for ends in (ends_q, ends_k))
        entries = slice(b, b + count)
        q, k, v = (
            heads_first(rows_of(p, t, entries, part), kind)
            for t, part in zip(x[:3], (rows, columns, columns), strict=True)
        )
        own = [m.at(b, count) for m in masks], [c.at(b, count) for c in scores]
        yield Sequence(entries, q, k, v, *own, rows, columns, heads)


def _together(p: Problem, ends_q: list[int], ends_k: list[int]) -> Iterator[tuple[int, int, int]]:
    """The first of some batch entries, how many are computed together, and how many of their key heads at once."""
    first = 0
    pairs = zip(pairwise(ends_q), pairwise(ends_k), strict=True)
    for lengths, run in groupby((i1 - i0, j1 - j0) for (i0, i1), (j0, j1) in pairs):
        heads, rows, columns = choose_tiles(p, lengths)
        most = max(1, heads // p.H_k) if lengths[0] <= rows and lengths[1] <= columns else 1
        last = first + sum(1 for _ in run)
        for b in range(first, last, most):
            yield b, min(most, last - b), heads
        first = last


def heads_in_turn(s: Sequence) -> Iterator[slice]:
    """The key heads of each round."""
    for h in range(0, s.k.shape[0], s.heads):
        yield slice(h, min(h + s.heads, s.k.shape[0]))


def heads_first(rows: Tensor, kind: torch.dtype) -> Tensor:
    """(entries, length, heads, size) to (entries * heads, length, size) in the type computed in."""
    return rows.transpose(1, 2).to(kind).contiguous().flatten(0, 1)


def count_of(s: Sequence) -> int:
    return s.b.stop - s.b.start


def rows_of(p: Problem, t: Tensor, b: slice, rows: slice) -> Tensor:
    """The (entries, length, heads, size) view of some batch entries."""
    return t[rows].unflatten(0, _split(b, rows)) if p.recipe.varlen else t[b]


def lse_rows_of(p: Problem, t: Tensor, b: slice, rows: slice) -> Tensor:
    """The (entries, heads, length) view of some batch entries."""
    return t[:, rows].unflatten(1, _split(b, rows)).transpose(0, 1) if p.recipe.varlen else t[b]


def _split(b: slice, rows: slice) -> tuple[int, int]:
    """Packed rows as so many entries of one length."""
    count = b.stop - b.start
    return count, (rows.stop - rows.start) // count


def compute_type(p: Problem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32
