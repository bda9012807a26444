"""Describe tensors to TMA."""

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call.problem import Problem

TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
TYPES |= {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}
LINE: Any = gl.NVMMASharedLayout(0, 32, rank=1)
PIECE: Any = gl.NVMMASharedLayout(0, 32, rank=2)


class Box(NamedTuple):
    """Tell how TMA reads a tensor, wherever it lies."""

    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any


class Descriptor(TensorDescriptor):
    """Describe a tensor to TMA. Gluon's own class checks what `why_not` has checked, which takes longer than a launch.

    Most launches only ask for `base` (host/direct.py).
    """

    padding = "zero"
    shape, strides, block_shape, layout = (property(operator.attrgetter(f"box.{name}")) for name in Box._fields)  # type: ignore[assignment]

    def __init__(self, base: Tensor, box: Box) -> None:
        self.base, self.box = base, box


def vector(t: Tensor, size: int, times: int = 1) -> Descriptor:
    """Describe a row of numbers, in boxes of `size`; so `times` of the kind, one behind the other."""
    return Descriptor(t, Box([t.numel() * times], [1], [size], LINE))


def sums_of_dq(t: Tensor, rows: int = 16) -> Descriptor:
    """Describe sums of dQ, in boxes of rows x 256."""
    return Descriptor(t, Box([t.numel() // 256, 256], [256, 1], [rows, 256], PIECE))


def box(shape: Sequence[int], stride: Sequence[int], rows: int, columns: int, p: Problem) -> Box:
    """Describe a tensor of this shape as (batch, heads, length, size), in boxes of `rows` rows of one head.

    TMA reads zeros out of bounds, and drops writes there.
    """
    if len(shape) == 3:
        shape, stride = (1, *shape), (shape[0] * stride[0], *stride)
    order = 0, 2, 1, 3
    block = 1, 1, rows, columns
    return Box([shape[n] for n in order], [stride[n] for n in order], [*block], layout_of(block, p.dtype))


def blocks_box(shape: Sequence[int], block: tuple[int, ...], dtype: torch.dtype) -> Box:
    """Describe a contiguous tensor as of this shape, in boxes of `block`."""
    strides = torch.empty(shape, device="meta").stride()
    return Box([*shape], [*strides], [*block], layout_of(block, dtype))


@lru_cache(64)
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the layout of a box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([*block], TYPES[dtype])


def addressable(t: Tensor) -> Tensor:
    """Return the tensor, copied if TMA cannot read it where it lies."""
    return t if t.data_ptr() % 16 == 0 and _steps_fit(t.stride(), t.itemsize) else t.contiguous()


@lru_cache(4096)
def _steps_fit(steps: tuple[int, ...], itemsize: int) -> bool:
    return steps[-1] == 1 and 0 not in steps and all(step * itemsize % 16 == 0 for step in steps[:-1])
