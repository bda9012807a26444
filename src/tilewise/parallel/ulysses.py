"""Rows for heads: before attention every rank gets all rows of some heads, and after it its own rows of all heads."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..values.masks import Mask, intersect
from ..values.score import Alibi, Bias, Score
from ..values.tables import Dense
from .exchange import swap
from .pieces import Pieces, index, length


class Swap(torch.autograd.Function):
    """Tensors (B, m, H, D) of a rank's rows become (B, N, H / U, D) of its heads, in the whole's order; or back.

    Each way is the other's gradient. All tensors travel in one message.
    """

    @staticmethod
    def forward(ctx: Any, axis: Any, pieces: tuple[Pieces, ...], to_heads: bool, *tensors: Tensor) -> Any:
        ctx.given = axis, pieces, to_heads
        return tuple((heads_of if to_heads else rows_of)(axis, pieces, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, pieces, to_heads = ctx.given
        return None, None, None, *Swap.apply(axis, pieces, not to_heads, *grads)


def heads_of(axis: Any, pieces: tuple[Pieces, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return all rows of this rank's heads, in the whole's order."""
    U, rows = len(pieces), [length(own) for own in pieces]
    parts = [torch.cat([t.chunk(U, 2)[u].reshape(-1) for t in tensors]) for u in range(U)]
    each = [t.shape[0] * t.shape[2] // U * t.shape[3] for t in tensors]
    got = swap(parts, [sum(each) * m for m in rows], axis)
    blocks = [part.split([size * m for size in each]) for part, m in zip(got, rows, strict=True)]
    order = order_of(pieces, tensors[0].device)
    out = []
    for t, found in zip(tensors, zip(*blocks, strict=True), strict=True):
        shaped = [x.view(t.shape[0], m, t.shape[2] // U, t.shape[3]) for x, m in zip(found, rows, strict=True)]
        whole = torch.cat(shaped, 1)
        out.append(whole if order is None else whole.index_select(1, order))
    return out


def rows_of(axis: Any, pieces: tuple[Pieces, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of all heads."""
    rows, own = [length(one) for one in pieces], length(pieces[dist.get_rank(axis)])
    order = order_of(pieces, tensors[0].device)
    back = None if order is None else order.argsort()
    local = [t if back is None else t.index_select(1, back) for t in tensors]
    split = [t.split(rows, 1) for t in local]
    parts = [torch.cat([blocks[u].reshape(-1) for blocks in split]) for u in range(len(pieces))]
    each = [t.shape[0] * own * t.shape[2] * t.shape[3] for t in tensors]
    got = [part.split(each) for part in swap(parts, [sum(each)] * len(pieces), axis)]
    shapes = [(t.shape[0], own, *t.shape[2:]) for t in tensors]
    found = zip(*got, strict=True)
    return [torch.cat([x.view(shape) for x in one], 2) for one, shape in zip(found, shapes, strict=True)]


def order_of(pieces: tuple[Pieces, ...], device: torch.device) -> Tensor | None:
    """Return which received row comes where in the whole; None if all are in order."""
    runs = [piece for own in pieces for piece in own]
    if all(end <= start for (_, end), (start, _) in pairwise(runs)):
        return None
    return torch.cat([index(own, device) for own in pieces]).argsort()


def spread_keys(k: Tensor, v: Tensor, H: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return k and v with as many heads for every rank: repeated, where several ranks need one head."""
    H_k = k.shape[2]
    if H_k % ranks == 0:
        return k, v
    of_heads = torch.arange(H, device=k.device) // (H // H_k)
    each = H // ranks
    wanted = of_heads[::each] if (H // H_k) % each == 0 else of_heads
    return k.index_select(2, wanted), v.index_select(2, wanted)


def of_heads(mask: Mask, score: tuple[Score, ...], heads: slice) -> tuple[Mask, tuple[Score, ...]]:
    """Return mask and scores for some query heads; a bias stays differentiable."""
    parts = tuple([Dense(cut(p.seen, heads, -3)) if isinstance(p, Dense) else p for p in mask.parts])
    return intersect(parts), tuple([_score_of(one, heads) for one in score])


def _score_of(score: Score, heads: slice) -> Score:
    if isinstance(score, Alibi):
        return type(score)(score.slopes[..., heads])
    return Bias(cut(score.bias, heads, -3)) if isinstance(score, Bias) else score


def cut(x: Tensor, part: slice, dim: int) -> Tensor:
    """Return a part along a dimension, if there is one with more than one entry."""
    if x.ndim < -dim or x.shape[dim] == 1:
        return x
    return x.narrow(dim, part.start, part.stop - part.start)
