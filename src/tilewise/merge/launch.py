"""Launch of the kernel that merges partial results."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from ..host.arguments import adjacent, cdiv, power_of_2, rows, rows_of_lse
from ..host.launch import Launch
from ..host.replay import launch_replayed
from .kernel import attention_merge

ENTRIES = 4096
"""Of a tile: 32 rows of 128."""


def merge_into(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the merged parts to o and lse, which may be the first part."""
    among = parts[0][0] is o
    tensors = [o, lse, *(t for part in parts[among:] for t in part)]
    launch_replayed((attention_merge, among), tensors, lambda compiled: [merge_launch(o, lse, parts, compiled)])


def merge_launch(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor]], compiled: dict[Any, Any]) -> Launch:
    """Return the launch that writes the merged parts to o and lse, whose last strides are 1."""
    *outer, M, H, D = o.shape
    columns = power_of_2(max(16, D))
    B_r = max(1, ENTRIES // columns)
    tiles = cdiv(M, B_r)
    given = tuple((rows(adjacent(x)), rows_of_lse(x_lse)) for x, x_lse in parts)
    constants = {"D": D, "B_R": B_r, "B_D": columns, "num_warps": 4}
    programs = prod(outer) * H * tiles
    return Launch(attention_merge, programs, (rows(o), rows_of_lse(lse), given, M, H, tiles), constants, compiled)
