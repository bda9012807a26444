"""Launch of the kernel that merges partial results."""

from collections.abc import Sequence

import triton
from torch import Tensor

from ..tile.merge import attention_merge
from ..tile.rows import Rows
from .launch import Launch, adjacent, cdiv, current_stream, on_device

ENTRIES = 4096
"""Of a tile: 32 rows of 128."""


def merge_launch(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Launch:
    """Return the launch that writes the merged parts to o and lse, whose last strides are 1."""
    if o.ndim == 3:  # packed rows are those of one batch entry
        o, lse, parts = o[None], lse[None], [(x[None], x_lse[None]) for x, x_lse in parts]
    B, M, H, D = o.shape
    columns = triton.next_power_of_2(max(16, D))  # type: ignore[attr-defined]
    B_r = max(1, ENTRIES // columns)
    tiles = cdiv(M, B_r)
    given = tuple((_rows(adjacent(x)), _of_lse(x_lse)) for x, x_lse in parts)
    constants = {"D": D, "B_R": B_r, "B_D": columns, "num_warps": 4}
    programs = B * H * tiles
    return Launch(attention_merge, programs, (_rows(o), _of_lse(lse), given, M, H, tiles), constants, {})


def _rows(o: Tensor) -> Rows:
    return Rows(o, *o.stride()[:3])


def _of_lse(lse: Tensor) -> Rows:
    """Return lse (B, H, M) with its strides, by numbers that lie side by side."""
    lse = lse if lse.stride(-1) == 1 else lse.contiguous()
    return Rows(lse, lse.stride(0), 1, lse.stride(1))


def merge_into(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the merged parts to o and lse."""
    with on_device(o):
        merge_launch(o, lse, parts).run(current_stream(o.device))
