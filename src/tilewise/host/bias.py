"""Launches that a bias needs: its gradient, and row sums where lse is too large to hold log l."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..call.operands import Grads
from ..call.problem import Problem
from ..tile.bias import Broadcast, Kind, attention_backward_dbias
from ..tile.renormalize import attention_backward_renormalize
from ..tile.rows import Packed, Rows
from ..values.score import Bias
from .arguments import cdiv, lengths, odd
from .launch import Launch


def bias_launches(
    p: Problem, given: Any, variant: Any, unit: float, stride: int, grads: Grads, tiles: Any, constants: Any, pl: Any,
    key: Any,
) -> Iterator[Launch]:  # fmt: skip
    """Yield a launch for every bias that wants a gradient. `given`: the backward's Q, K, V, dO and `RowValues`."""
    index = sum(len(kind.captures) for kind in p.kinds[: len(p.recipe.mask)])
    for position, kind in enumerate(p.kinds[len(p.recipe.mask) :]):
        grad = grads.extra[index] if kind is Bias else None
        index += len(kind.captures)
        if grad is None:
            continue
        whole = grad[(None,) * (4 - grad.ndim)]
        batch, heads, length, width = whole.shape
        tiles_r, tiles_c = cdiv(length, tiles.B_r), cdiv(width, tiles.B_c)
        nothing = 0 in (p.B, p.M, p.N)
        b_each, *each = (1, 1, 1, 1) if nothing else (
            p.B // batch, p.H // heads,
            cdiv(p.M, tiles.B_r) if length == 1 else 1, cdiv(p.N, tiles.B_c) if width == 1 else 1,
        )  # fmt: skip
        steps = whole.stride()
        sizes = Broadcast(*map(odd, (heads, length, width, tiles_r, tiles_c, *each)))
        gradient = Rows(grad, steps[0], steps[2], steps[1])
        arguments = (*given, gradient, variant, unit, p.M, p.N, p.H, b_each, sizes, stride)
        programs = 0 if nothing else batch * heads * tiles_r * tiles_c
        bias = {"bias": Kind(position, length == 1, width == 1)}
        at = key, position, grad.data_ptr() % 16
        yield Launch(attention_backward_dbias, programs, arguments, {**bias, **constants}, pl.compiled, at)


def renormalize_launches(
    p: Problem, given: Any, lse: Tensor, where: Packed | None, variant: Any, unit: float, stride: int, tiles: Any,
    constants: Any, pl: Any, key: Any,
) -> list[Launch]:  # fmt: skip
    """Return the launch that overwrites L by the log of the row sums of P, which only a bias needs.

    It runs after the kernel that computes L from lse (tile/renormalize.py says why). `given` are Q, K and L.
    """
    if not p.biased:
        return []
    count = cdiv(p.M, tiles.B_r)
    arguments = (*given, lse, where, variant, unit, *lengths(p), p.H, count, stride)
    return [Launch(attention_backward_renormalize, p.B * p.H * count, arguments, constants, pl.compiled, key)]
