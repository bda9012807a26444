"""Lists of tiles, which masks carry to kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .masks import Mask, Several


@dataclass(frozen=True, eq=False)
class TileList(Mask):
    """Tell kernels which tiles a mask of M x N leaves; it hides nothing itself.

    tiles: (B, H, tiles of queries, 2 + tiles of keys) int32, or `by_key` (B, H, tiles of keys, 2 + tiles of queries).
    B and H may be 1. Each row has how many tiles are partly visible and how many wholly, then which. A tile has B_r
    queries and B_c keys.
    """

    tiles: Tensor
    by_key: bool
    B_r: int
    B_c: int
    M: int
    N: int
    captures = ("tiles",)
    shapes = ("BHTL",)
    broadcasts = True
    varlen = False

    @staticmethod
    def rule(b, h, i, j, tiles, by_key, *sizes):
        return True

    @classmethod
    def public_name(cls) -> str:
        return "listed"

    @classmethod
    def whole_shapes(cls, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[int, ...]]:
        by_key, B_r, B_c, M, N = numbers
        of_rows, of_columns = -(-M // B_r), -(-N // B_c)
        count, across = (of_columns, of_rows) if by_key else (of_rows, of_columns)
        return [(problem.B, problem.H, count, across + 2)]


@dataclass(frozen=True, eq=False)
class Listed(Several):
    """Show what `mask` shows, and carry lists of its tiles. `listed & other` is `mask & other`, whose tiles differ."""

    mask: Mask
    lists: tuple[Any, ...]

    @property
    def tile_lists(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.lists

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts

    def to(self, device: torch.device | str | int) -> "Listed":
        return Listed(self.mask.to(device), tuple([one.to(device) for one in self.lists]))
