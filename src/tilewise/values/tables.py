"""Masks that are read from tables: documents, any bool tensor, and lists of tiles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import Entries
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

    def keep(self, at: Entries) -> Tensor:
        rows, columns = self.q_ids[:, at.i[:, 0]], self.k_ids[:, at.j[0]]
        return (rows[:, :, None] == columns[:, None, :])[:, None]

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
        index = zip((b, h, i, j)[4 - seen.ndim :], seen.shape, strict=True)
        return seen[tuple([x if size > 1 else 0 for x, size in index])] if seen.ndim else seen

    def __post_init__(self) -> None:
        check_type("Dense: seen", self.seen, (torch.bool,), "bool")
        if self.seen.ndim > 4:
            raise ValueError(
                f"Dense: seen must broadcast to (B, H, M, N), got {self.seen.ndim} dimensions; reshape it to 4 or fewer"
            )

    def keep(self, at: Entries) -> Tensor:
        return tile_of(self.seen, at.i[:, 0], at.j[0])

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
    captures = ("tiles",)
    shapes = ("BHTL",)
    broadcasts = True
    varlen = False

    @classmethod
    def public_name(cls) -> str:
        return "listed"

    @classmethod
    def whole_shapes(cls, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[int, ...]]:
        by_key, B_r, B_c, M, N = numbers
        of_rows, of_columns = -(-M // B_r), -(-N // B_c)
        count, across = (of_columns, of_rows) if by_key else (of_rows, of_columns)
        return [(problem.B, problem.H, count, across + 2)]


def tile_of(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the given rows and columns of a tensor that broadcasts to (B, H, M, N)."""
    tensor = tensor[(None,) * (4 - tensor.ndim)]
    rows = rows if tensor.shape[2] > 1 else torch.zeros_like(rows[:1])
    columns = columns if tensor.shape[3] > 1 else torch.zeros_like(columns[:1])
    return tensor[:, :, rows[:, None], columns[None, :]]
