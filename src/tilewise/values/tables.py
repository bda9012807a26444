"""Masks that are read from tables: documents, any bool tensor, and lists of tiles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .function import read
from .masks import Mask
from .value import AS_WIDE, INTEGER_TYPES, check_type


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Show a query the keys with its document id; tiles without a match are skipped.

    q_ids: (B, M) and k_ids: (B, N), int32 or int64. Raises TypeError or ValueError for other types or shapes.
    """

    q_ids: Tensor
    k_ids: Tensor
    device = "documents"
    captures = ("q_ids", "k_ids")
    shapes = ("BM", "BN")
    interval = False
    varlen = False
    not_cached = "its key ids would need an entry for every row of the cache's capacity"
    align = "first"

    @staticmethod
    def rule(b, h, i, j, q_ids, k_ids):
        return q_ids[b, i] == k_ids[b, j]

    def __post_init__(self) -> None:
        for name in self.captures:
            ids = getattr(self, name)
            check_type(f"Documents: {name}", ids, INTEGER_TYPES, "int32 or int64")
            if ids.ndim != 2:
                raise ValueError(
                    f"Documents: {name} must have shape (B, length), got {tuple(ids.shape)}; "
                    "give each batch entry a row of ids"
                )

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.q_ids, *self.q_ids.stride(), self.k_ids, *self.k_ids.stride(), problem.M, problem.N)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Apply any boolean mask, true where the query sees the key; tiles without a true entry are skipped.

    seen: bool, broadcast to (B, H, M, N). Raises TypeError or ValueError for other types or more dimensions.
    """

    seen: Tensor
    device = "dense"
    captures = ("seen",)
    shapes = ("BHMN",)
    broadcasts = True
    interval = False
    varlen = False
    not_cached = AS_WIDE
    align = "first"

    @staticmethod
    def rule(b, h, i, j, seen):
        return read(seen, b, h, i, j)

    def __post_init__(self) -> None:
        check_type("Dense: seen", self.seen, (torch.bool,), "bool")
        if self.seen.ndim > 4:
            raise ValueError(
                f"Dense: seen must broadcast to (B, H, M, N), got {self.seen.ndim} dimensions; reshape it to 4 or fewer"
            )

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.seen, *self.seen.expand(problem.B, problem.H, problem.M, problem.N).stride(), problem.M, problem.N)


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
    device = ""  # the loops over tiles read it, not a function of the mask
    rule_takes = ()
    captures = ("tiles",)
    shapes = ("BHTL",)
    broadcasts = True
    varlen = False

    @staticmethod
    def rule(b, h, i, j):
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
