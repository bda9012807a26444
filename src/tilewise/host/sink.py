"""The launch for the gradient of a sink that learns (tile/sink.py)."""

from typing import Any

from torch import Tensor

from ..call.operands import Grads, Operands
from ..call.problem import Problem
from ..tile.sink import attention_backward_sink
from .arguments import packed
from .launch import Launch

CONSTANTS = {"ROWS": 4096, "num_warps": 16}
"""A program reads 32 kB at once. With twice as much, ptxas spills in packed sequences."""


def sink_learns(p: Problem) -> bool:
    """Tell whether a backward gives a sink its gradient."""
    return p.recipe.sink and any(p.wanted) and p.wanted[p.sink_at]


def sink_launches(
    p: Problem, pl: Any, x: Operands, lse: Tensor, delta: Any, block: int, grads: Grads, key: Any
) -> list[Launch]:
    """Return the launch, if there is one. Packed sequences begin in delta at blocks of `block` rows, unless it is 1."""
    if not sink_learns(p):
        return []
    sink, where = x.extra[p.sink_at], packed(p, x) if block > 1 else None
    arguments = (
        grads.extra[p.sink_at], sink, sink.stride(0), lse, delta, where and where.cu_q, p.B.bit_length(), p.B,
        p.q.shape[-3], p.H, p.queries, delta.numel() // max(1, p.batch * p.H),
    )  # fmt: skip
    return [Launch(attention_backward_sink, p.H, arguments, {"BLOCK": block, **CONSTANTS}, pl.compiled, key)]
