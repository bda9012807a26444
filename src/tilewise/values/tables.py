"""Masks that are read from tables: documents, any bool tensor, lists of blocks, and lists of tiles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import Aligned
from .function import program_of, read
from .masks import ByHead, Mask
from .value import AS_WIDE, INTEGER_TYPES, Unsupported, check_type, constant, integer


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Show a query the keys with its document id; tiles without a match are skipped.

    q_ids: (B, M) and k_ids: (B, N), int32 or int64. Raises TypeError or ValueError for other types or shapes.
    """

    q_ids: Tensor
    k_ids: Tensor
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


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Apply any boolean mask, true where the query sees the key; tiles without a true entry are skipped.

    seen: bool, broadcast to (B, H, M, N). Raises TypeError or ValueError for other types or more dimensions.
    """

    seen: Tensor
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


@dataclass(frozen=True, eq=False)
class Blocks(ByHead):
    """Show each block of rows the blocks of keys that a list names: sparse attention by block, with lists per head.

    lists: (B or 1, H or 1, ceil(M / rows), width), int32 or int64: the blocks of keys that a block of rows sees, in any
    order. -1 is none, and so is a block after the last. size: the rows and keys of a block, (rows, keys), or one int
    for both. In packed sequences blocks count from each one's first row and key. `|` and `~` read the lists, and so
    synchronise with a GPU; later changes of them do not count there. Raises TypeError or ValueError for other types,
    shapes or sizes.
    """

    lists: Tensor
    size: Any
    captures = ("lists",)
    shapes = ("BHRW",)

    def __post_init__(self) -> None:
        check_type("Blocks: lists", self.lists, INTEGER_TYPES, "int32 or int64")
        if self.lists.ndim != 4:
            raise ValueError(
                f"Blocks: lists must have shape (B, H, blocks of rows, width), got {tuple(self.lists.shape)}; "
                "give each block of rows a list, and B or H of 1 where they are alike"
            )
        sizes = self.size if isinstance(self.size, (tuple, list)) else (self.size, self.size)
        found = tuple([constant(integer("Blocks: size", n, "an int > 0, or two: (rows, keys)")) for n in sizes])
        if len(found) != 2 or min(found) < 1:
            raise ValueError(f"Blocks: size must be an int > 0, or two, (rows, keys), got {self.size!r}; pass 64, say")
        object.__setattr__(self, "size", found)

    @property
    def hides_later_keys(self) -> bool:
        return False

    @property
    def traced(self) -> Aligned:
        last = int(self.lists.max()) + 1 if self.lists.numel() else 0  # a block that is on no list
        return program_of(_of_far_keys, "mask", (self.table(last + 1), *self.size, last), "first")

    def table(self, across: int) -> Tensor:
        """Return which of so many blocks of keys are listed."""
        inside = torch.where((self.lists >= 0) & (self.lists < across), self.lists, across)
        table = torch.zeros((*self.lists.shape[:3], across + 1), dtype=torch.bool, device=self.lists.device)
        return table.scatter(-1, inside.long(), True)[..., :across]

    def prepared(self, layout: Any, q: Tensor, k: Tensor) -> Mask:
        if "cache" in layout.needs:
            raise Unsupported(
                f"Blocks does not go with Cached: {self.not_cached}; gather the keys and pass them without a layout"
            )
        layout.check_ranks({"q": q.shape, "k": k.shape})
        B, M, N, _ = layout.sizes(q.shape, k.shape, layout.longest())
        if self.lists.shape[0] not in (1, B) or self.lists.shape[1] not in (1, q.shape[-2]):
            raise ValueError(
                f"Blocks: lists must have {B} batch entries or 1, and {q.shape[-2]} heads or 1, got "
                f"{tuple(self.lists.shape)}; give each head of q its lists"
            )
        return self.of_sizes(M, N)

    def of_sizes(self, M: int, N: int) -> Mask:
        rows, keys = self.size
        lists, down, across = self.lists, -(-M // rows), -(-N // keys)
        if lists.shape[2] != down:
            raise ValueError(
                f"Blocks: lists must have a list for each of {down} blocks of {rows} rows, got {tuple(lists.shape)}; "
                "pass (B, H, ceil(M / rows), width)"
            )
        return BlockTable.rebuild(self.size, (self.table(across),))


def _of_far_keys(b: Any, h: Any, i: Any, j: Any, table: Any, height: Any, width: Any, last: Any) -> Any:
    return read(table, b, h, i // height, (j // width).clamp(max=last))


@dataclass(frozen=True, eq=False)
class BlockTable(ByHead):
    """Show what Blocks does, as a table (B, H, blocks of rows, blocks of keys) of which blocks are listed."""

    table: Tensor
    height: int
    width: int
    captures = ("table",)
    shapes = ("BHRC",)

    @staticmethod
    def rule(b, h, i, j, table, height, width):
        return read(table, b, h, i // height, j // width)

    @classmethod
    def public_name(cls) -> str:
        return "Blocks"

    @classmethod
    def whole_shapes(cls, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        height, width = numbers
        return [(problem.B, problem.H, -(-problem.M // height), -(-problem.N // width))]


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
