"""The launch that a bias needs: row sums where lse is too large to hold log l."""

from typing import Any

from torch import Tensor

from ..call.problem import Problem
from ..tile.renormalize import attention_backward_renormalize
from .arguments import cdiv
from .launch import Launch


def renormalize_launches(
    p: Problem, given: Any, lse: Tensor, variant: Any, unit: float, stride: int, tiles: Any, constants: Any, pl: Any,
    key: Any,
) -> list[Launch]:  # fmt: skip
    """Return the launch that overwrites L by the log of the row sums of P, which only a bias needs.

    It runs after the kernel that computes L from lse (tile/renormalize.py says why). `given` are Q, K and L.
    """
    if not p.biased:
        return []
    count = cdiv(p.M, tiles.B_r)
    arguments = (*given, lse, variant, unit, p.M, p.N, p.H, count, stride)
    return [Launch(attention_backward_renormalize, p.B * p.H * count, arguments, constants, pl.compiled, key)]
