"""Launches that recompute tiles of S beside a backward's main kernels: of row sums, where lse is too large to hold log
l, which only a bias needs. For the others see gather.py."""

from typing import Any, NamedTuple

from torch import Tensor

from ..call.problem import Problem
from ..tile.renormalize import attention_backward_renormalize
from .arguments import cdiv, lengths, packed_by
from .launch import Launch


class Recompute(NamedTuple):
    """What such launches share."""

    p: Problem
    extra: tuple[Tensor, ...]
    operands: tuple[Any, ...]
    """Q, K, V, dO and the backward's `RowValues`."""
    lse: Tensor
    variant: Any
    """Without lists."""
    unit: float
    stride: int
    """Row values of a head."""
    block: int
    """Row values of a block, where packed sequences begin at blocks of their own; else 1."""
    tiles: Any
    constants: dict[str, Any]
    pl: Any
    key: Any


def renormalize_launch(c: Recompute) -> Launch:
    """Return the launch that overwrites L by the log of the row sums of P.

    It runs after the kernel that computes L from lse (tile/renormalize.py says why).
    """
    p, (q, k, _, _, scratch) = c.p, c.operands
    count = cdiv(p.M, c.tiles.B_r)
    arguments = (
        q, k, scratch.logs, c.lse, packed_by(p, c.extra), c.variant, c.unit, *lengths(p), p.H, count, c.stride,
    )  # fmt: skip
    constants = {"BLOCK": c.block, **c.constants}
    return Launch(attention_backward_renormalize, p.B * p.H * count, arguments, constants, c.pl.compiled, c.key)
