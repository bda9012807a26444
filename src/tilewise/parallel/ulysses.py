"""Rows for heads: before attention every rank gets all rows of some heads, and after it its own rows of all heads."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    of_ranks = [t.unflatten(2, (U, -1)).permute(2, 1, 0, 3, 4).flatten(3) for t in tensors]
    mine = torch.cat(of_ranks, 3).flatten(0, 1)  # (U m, B, h / U * D of all tensors)
    whole = swap(mine, [mine.shape[0] // U] * U, rows, axis)  # (N, B, ...)
    parts = whole.split([t.shape[2] // U * t.shape[3] for t in tensors], 2)
    if (order := order_of(pieces, whole.device)) is not None:
        parts = tuple([part.index_select(0, order) for part in parts])
    return [
        part.unflatten(2, (-1, t.shape[3])).transpose(0, 1).contiguous() for t, part in zip(tensors, parts, strict=True)
    ]


def rows_of(axis: Any, pieces: tuple[Pieces, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of all heads."""
    U, rows = len(pieces), [length(own) for own in pieces]
    parts = [t.flatten(2).transpose(0, 1) for t in tensors]
    if (order := order_of(pieces, parts[0].device)) is not None:
        inverse = order.argsort()
        parts = [part.index_select(0, inverse) for part in parts]
    whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]  # (N, B, h * D of all tensors)
    mine = swap(whole, rows, [rows[dist.get_rank(axis)]] * U, axis).unflatten(0, (U, -1))  # (U, m, B, ...)
    found = mine.split([t.shape[2] * t.shape[3] for t in tensors], 3)
    each = [part.unflatten(3, (-1, t.shape[3])) for t, part in zip(tensors, found, strict=True)]
    return [part.permute(2, 1, 0, 3, 4).flatten(2, 3).contiguous() for part in each]


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
