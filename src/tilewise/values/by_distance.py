"""Scores that read what depends on i - j alone from a table, which PyTorch computes (program/distance.py)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program import Entries, apply, pull, zero_sums
from .of import ScoreOf
from .score import Score

MANY = 1 << 24
"""Entries of S in all heads from which on a table is quicker: on a GPU, each of its operations is a launch."""


def by_distance(scores: Sequence[Score], sizes: tuple[int, int, int, int], q: Tensor) -> tuple[Score, ...]:
    """Return scores of logits (B, H, M, N) = sizes, in which those that are functions read tables where it pays."""
    many = math.prod(sizes) >= MANY
    return tuple([_by_distance(one, sizes, q) if many and isinstance(one, ScoreOf) else one for one in scores])


def _by_distance(score: ScoreOf, sizes: tuple[int, int, int, int], q: Tensor) -> ScoreOf:
    from ..program.distance import split  # on first use, for a quick import of the package

    found = split(score.text, len(score.given), len(score.numbers))
    if found is None:
        return score
    B, H, M, N = sizes
    first = N - 1 if score.align == "first" else M - 1  # the least distance is this below 0
    tables = [
        Table.apply(part, (B, H, M + N - 1), first, score.numbers, q, *score.given)  # type: ignore[no-untyped-call]
        for part in found.parts
    ]
    given = (*[score.given[n] for n in found.others], *tables)
    return ScoreOf(found.program.text, score.align, given, (*score.numbers, first), score.place)


class Table(torch.autograd.Function):
    """What a part of a score is at each distance, from -first on: (B or 1, H or 1, distances), in fp32 or fp64."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, part: Any, sizes: tuple[int, int, int], first: int, numbers: Any, q: Tensor, *tensors: Tensor
    ) -> Tensor:
        B, H = (n if c in part.letters else 1 for n, c in zip(sizes, "bh", strict=False))
        ranges = slice(0, B), slice(0, H), slice(0, sizes[2]), slice(0, 1)
        ctx.at = Entries.at(ranges, -first, q.device).from_last()._replace(ranges=None)
        ctx.part, ctx.numbers = part, (*numbers, *[tensors[t].shape[dim] for t, dim in part.sizes])
        ctx.save_for_backward(*tensors)
        S = torch.zeros((B, H, sizes[2], 1), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        return apply(part.program, S, ctx.at, tensors, ctx.numbers)[..., 0].contiguous()

    @staticmethod
    def backward(ctx: Any, d_table: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors
        sums = zero_sums(tensors, d_table.dtype)
        dS = d_table[..., None]
        pull(ctx.part.program, dS, torch.zeros_like(dS), ctx.at, sums, tensors, ctx.numbers)
        grads = [None if n not in sums else sums[n].to(t.dtype) for n, t in enumerate(tensors)]
        return None, None, None, None, None, *grads
