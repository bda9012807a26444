"""Masks by head: intervals for the rows of each head, and lists of blocks. They run where functions run."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import Aligned
from .function import program_of, read
from .intervals import Spans
from .masks import Mask
from .of import MaskOf
from .value import INTEGER_TYPES, Unsupported, check_ranks, check_type, constant, integer


class ByHead(Mask):
    """A mask of tensors (B or 1, H or 1, ...), which runs where functions run."""

    interval = False
    varlen = False
    align = "first"
    not_cached = "its rows count from the first, which a cache does not know"

    @classmethod
    def fits(cls, shape: tuple[int, ...], whole: tuple[Any, ...]) -> bool:
        batch, heads, *others = whole
        return (
            len(shape) == len(whole)
            and shape[0] in (1, batch)
            and shape[1] in (1, heads)
            and all([size is None or size == own for size, own in zip(others, shape[2:], strict=True)])
        )

    @classmethod
    def allowed(cls, n: int, whole: tuple[Any, ...]) -> str:
        batch, heads, *others = ["any" if size is None else size for size in whole]
        return f"have shape ({batch} or 1, {heads} or 1, {', '.join(map(str, others))})"

    def of_whole(self, N: int) -> Mask:
        return MaskOf.from_program(self.of_sizes(N, N).traced, self.public_name())


@dataclass(frozen=True, eq=False)
class SpansByHead(ByHead, Spans):
    """Show the rows of each head what is in one of K intervals: Spans of (B, H, M, K)."""

    lo: Tensor
    hi: Tensor
    device = ""
    shapes = ("BHMK", "BHMK")

    @staticmethod
    def rule(b, h, i, j, lo, hi):
        seen: Any = False
        for n in range(lo.shape[-1]):
            seen = seen | ((read(lo, b, h, i, n) <= j) & (j < read(hi, b, h, i, n)))
        return seen

    @classmethod
    def sketch(cls, x: Any) -> Any:
        dtype, sizes = super().sketch(x)
        return dtype, (*sizes[:-1], x.shape[-1])

    @classmethod
    def public_name(cls) -> str:
        return "Spans"

    @classmethod
    def whole_shapes(cls, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return [(problem.B, problem.H, problem.M, None)] * 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lo.shape[-1] != self.hi.shape[-1]:
            raise ValueError(
                f"Spans: lo and hi must have as many intervals, got {tuple(self.lo.shape)} and "
                f"{tuple(self.hi.shape)}; pad the shorter with lo = hi = 0, which is none"
            )

    def check_contents(self, M: Any, N: Any) -> None:
        """Take all numbers."""


Spans.of_ranks[4] = SpansByHead


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
        remedy = "give each block of rows a list, and B or H of 1 where they are alike"
        check_ranks("Blocks: lists", self.lists, (4,), "have shape (B, H, blocks of rows, width)", remedy)
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
