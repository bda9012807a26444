"""Where rows lie: in a padded batch (Padded), or in packed sequences (Varlen). For keys in a cache, see cached.py.

Of the tensors' specs, the methods read shapes; those that say so want the tensors themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from .value import Option, check_offsets, check_strided, integer


class Sizes(NamedTuple):
    """The sizes of a call, which follow from its layout and shapes."""

    B: int
    """Batch entries, or packed sequences."""
    M: int
    """Queries of the longest."""
    N: int
    """Keys of the longest; of a cache, its capacity."""
    keys: int
    """Rows of k that lie side by side: N, or those of all packed sequences."""


class Layout(Option):
    """Every layout derives from this class. Absent tensors are None."""

    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    table: Any = None
    starts: Any = None
    index: Any = None
    k_scale: Any = None
    v_scale: Any = None
    invariant: int = 0
    unbounded: bool = False
    """Whether nothing bounds the number of queries of one sequence, but that of all."""
    most: int | None = None
    """The most queries of a sequence that is computed; None for all sequences. Nothing is written for others."""
    uniform: ClassVar[bool] = False
    """Whether all batch entries have M queries and N keys."""

    @staticmethod
    def of(given: Any) -> "Layout":
        """Return what `layout=` says, by default a padded batch, or raise TypeError."""
        if given is None:
            return PADDED
        if not isinstance(given, Layout):
            raise TypeError(
                f"layout must be None, a Varlen or a Cached, got {given!r}; write layout=tilewise.Varlen(cu_q, cu_k)"
            )
        return given

    @property
    def needs(self) -> frozenset[str]:
        """Return what a back end must be able to read, by the names of `call.backend.NEEDS`."""
        return frozenset()

    @property
    def scaled(self) -> tuple[str, ...]:
        """Return which of q, k and v are in 8 bits, with a scale."""
        return ()

    @cached_property
    def key(self) -> Any:
        return self.plain, self.longest()

    def longest(self) -> tuple[int, int]:
        """Return max_q and max_k, as the operators take them."""
        return 0, 0

    def count(self, q: tuple[int, ...]) -> int:
        """Return the number of batch entries, or sequences, for q's shape."""
        raise NotImplementedError

    def sizes(self, q: tuple[int, ...], k: tuple[int, ...], longest: tuple[int, int]) -> Sizes:
        """Return the sizes of a call with shapes q and k."""
        raise NotImplementedError

    def check_ranks(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if q, k or v has another number of dimensions."""
        raise NotImplementedError

    def heads_first(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor of (batch, heads, length, head size) should have had; others as they are."""
        return shape

    def with_scales(self, k: Tensor, v: Tensor) -> "Layout":
        """Return the layout of keys and values in 8 bits with these scales, or raise ValueError."""
        raise ValueError(
            f"layout must be a Cached where k is a Quantized and q is none, got {self!r}; pass one, give q a scale, "
            "too, or convert k and v"
        )

    def place(self, values: Sequence[Any], origin: Any, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        """Return masks or scores of a call that begins at an Origin of the whole."""
        if origin.row or origin.column:
            raise ValueError(
                f"origin must have row=0 and column=0 with a layout, got {origin.row} and {origin.column}; "
                "pass whole sequences, or leave row and column out"
            )
        return tuple([value.of_part(origin) for value in values])

    def refuse_backward(self) -> None:
        """Raise Unsupported if calls with the layout have no backward."""

    def check_qkv(self, qkv: Tensor) -> None:
        """Raise ValueError unless a tensor can hold q, k and v."""
        raise NotImplementedError

    def check_contents(self, p: Any, masks: Sequence[Any]) -> tuple[Any, Any]:
        """Return the numbers of queries and keys, or tensors of each sequence's, once what the tensors hold is
        checked."""
        return p.M, p.N

    def blocks(self, rows: int, B: int, size: int) -> int:
        """Return how many blocks of `size` rows a head has, where sequences begin with a block: at most these."""
        return rows // size + B

    def query_tiles(self, p: Any, size: int) -> tuple[int, int]:
        """Return how many tiles of `size` queries a score matrix has, and how many such matrices there are."""
        return -(-p.M // size), p.B * p.H

    def packed(self, p: Any) -> tuple[Any, Any, int, int] | None:
        """Return cu_q, cu_k, and bounds on the lengths, as kernels take them; None where batch entries are padded."""
        return None

    def page(self, p: Any) -> int | None:
        """Return the rows of a page, or 0 of a contiguous cache; None where keys are in no cache."""
        return None

    def at_once(self, M: int) -> int:
        """Return how many of a sequence's M queries to compute together."""
        return M

    def look_ups(self, p: Any, size: int) -> int:
        """Return how many pages are looked up for a tile of `size` keys, at most."""
        return 0

    def splits_keys(self, p: Any) -> bool:
        """Tell whether a forward may split the keys of a sequence. Of packed ones, some may have many queries."""
        return False

    def common(self, length: int) -> int:
        """Return a number of which a length, or a difference of two, is a multiple in all sequences."""
        return 1

    def concurrent(self, most: int, heads: int, if_equal: int) -> int:
        """Return how many loops of a backward run at once; if lengths differ, at most `most`, all of one sequence."""
        return next(count for count in range(most, 0, -1) if heads % count == 0)

    def resized(self, p: Any, B: int, M: int, N: int) -> tuple[Any, Any, tuple[tuple[int, ...], ...]]:
        """Return the rows of q and of k, and the shapes of the layout's tensors, with other sizes."""
        return (B, M), (B, N), ()

    # the tensors themselves

    def pairs(self, p: Any) -> int:
        """Return how many entries the score matrices of a head have, ignoring masks; from shapes, for fake tensors."""
        return p.queries * p.N

    def ends(self, p: Any) -> tuple[list[int], list[int]]:
        """Return where sequences begin and end, in the rows of q and of k, one after the other."""
        raise NotImplementedError

    def groups(self, p: Any) -> Iterator[tuple[slice, slice, slice]]:
        """Yield batch entries of one length, and their rows of q and of k."""
        for b, (rows, keys) in enumerate(zip(*map(pairwise, self.ends(p)), strict=True)):
            yield slice(b, b + 1), slice(*rows), slice(*keys)

    def rows_of(self, t: Tensor, entries: slice, rows: slice) -> Tensor:
        """Return a view (entries, length, heads, size) of some batch entries of one length."""
        count = entries.stop - entries.start
        return t[rows].unflatten(0, (count, (rows.stop - rows.start) // count))

    def lse_of(self, lse: Tensor, entries: slice, rows: slice) -> Tensor:
        """Return a view (entries, heads, length) of some batch entries of one length."""
        count = entries.stop - entries.start
        return lse[:, rows].unflatten(1, (count, (rows.stop - rows.start) // count)).transpose(0, 1)

    def sequence_of(self, side: int, rows: int) -> Tensor:
        """Return which sequence has each row of q (side 0) or k (side 1); a row of none has any."""
        cu = (self.cu_q, self.cu_k)[side].long()
        t = torch.arange(rows, device=cu.device)
        return (torch.searchsorted(cu, t, right=True) - 1).clamp(0, len(cu) - 2)

    def of_rows(self, t: Tensor, side: int, rows: int) -> Tensor:
        """Return what each batch entry has, (B, ...), as it broadcasts to rows of q (side 0) or k (side 1)."""
        if len(t) == 0:  # all rows are of no sequence
            return t.new_zeros(rows, *t.shape[1:])
        return t[self.sequence_of(side, rows)]

    def in_blocks(self, side: int, rows: int, size: int) -> Any:
        """Return where each row of q (side 0) or k (side 1) lies among blocks (see `blocks`), as an index."""
        cu = (self.cu_q, self.cu_k)[side].long()
        b = self.sequence_of(side, rows)
        at = (cu[b] // size + b) * size + torch.arange(rows, device=cu.device) - cu[b]
        return at.clamp(0, self.blocks(rows, len(cu) - 1, size) * size - 1)  # bad offsets must stay inside


@dataclass(frozen=True, eq=False)
class Padded(Layout):
    """A batch of entries of one length: q (B, M, H, D), k (B, N, H_k, D), v (B, N, H_k, D_v). The default."""

    uniform = True

    def count(self, q: tuple[int, ...]) -> int:
        return q[0]

    def sizes(self, q: tuple[int, ...], k: tuple[int, ...], longest: tuple[int, int]) -> Sizes:
        return Sizes(q[0], q[1], k[1], k[1])

    def check_ranks(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        check_ranks(shapes, 4, "(batch, length, heads, head size)")

    def heads_first(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], shape[2], shape[1], shape[3]

    def place(self, values: Sequence[Any], origin: Any, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        return tuple([value.placed(origin, q.shape[-3], k.shape[-3]) for value in values])

    def check_qkv(self, qkv: Tensor) -> None:
        if qkv.ndim != 5 or qkv.shape[-3] != 3:
            hint = "pass layout=Varlen(...) for packed sequences" if qkv.ndim == 4 else AS_ONE
            raise ValueError(f"qkv must have shape (B, N, 3, H, D), got {tuple(qkv.shape)}; {hint}")

    def check(self, problem: Any) -> None:
        self.check_ranks(problem.shapes)
        q, k, v = (spec.shape[0] for spec in problem[1:4])
        if not q == k == v:
            raise ValueError(
                f"q, k and v must have one batch size, got {q}, {k}, {v}; expand those of size 1 with .expand(...)"
            )

    def blocks(self, rows: int, B: int, size: int) -> int:
        return -(-rows // size)

    def splits_keys(self, p: Any) -> bool:
        return p.few_rows

    def common(self, length: int) -> int:
        return length

    def concurrent(self, most: int, heads: int, if_equal: int) -> int:
        return if_equal

    def ends(self, p: Any) -> tuple[list[int], list[int]]:
        return [b * p.M for b in range(p.B + 1)], [b * p.N for b in range(p.B + 1)]

    def groups(self, p: Any) -> Iterator[tuple[slice, slice, slice]]:
        yield slice(0, p.B), slice(0, p.M), slice(0, p.N)

    def rows_of(self, t: Tensor, entries: slice, rows: slice) -> Tensor:
        return t[entries]

    def lse_of(self, lse: Tensor, entries: slice, rows: slice) -> Tensor:
        return lse[entries]

    def of_rows(self, t: Tensor, side: int, rows: int) -> Tensor:
        return t[:, None]

    def in_blocks(self, side: int, rows: int, size: int) -> Any:
        return slice(0, rows)


PADDED = Padded()
AS_ONE = "stack q, k and v in front of the heads"


@dataclass(frozen=True, eq=False)
class Varlen(Layout):
    """Packed sequences, one after the other without padding: q (T, H, D), k (T', H_k, D), v (T', H_k, D_v).

    cu_q and cu_k are int32 (B + 1,) on q's device. They start at 0, never decrease, and end at the number of rows or
    before. Sequence b has the rows from cu[b] up to, not including, cu[b + 1]. max_q and max_k are the longest lengths;
    None reads them from the tensors, which synchronises with a GPU.

    Each sequence is one batch entry. Its indices i and j start at 0, and masks and dropout use its own lengths M and N.
    Rows from cu[B] on belong to no sequence: o and all gradients are 0 there, and lse is -inf.

    Raises TypeError or ValueError for a wrong type, shape or number.
    """

    cu_q: Tensor = field()
    cu_k: Tensor = field()
    max_q: int | None = None
    max_k: int | None = None
    captures = ("cu_q", "cu_k")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"packed"})

    def __post_init__(self) -> None:
        for name in self.captures:
            cu = getattr(self, name)
            if not isinstance(cu, Tensor):
                raise TypeError(
                    f"Varlen: {name} must be an int32 tensor of shape (B + 1,), got {type(cu).__name__}; "
                    "convert it with torch.tensor(..., dtype=torch.int32)"
                )
            if cu.dtype != torch.int32:
                raise TypeError(f"Varlen: {name} must be int32, got {cu.dtype}; convert it with .to(torch.int32)")
            check_strided(f"Varlen: {name}", cu)
            if cu.ndim != 1 or cu.shape[0] < 1:
                raise ValueError(
                    f"Varlen: {name} must have shape (B + 1,), got {tuple(cu.shape)}; "
                    "write the cumulative sum of the lengths, from 0 on"
                )
        if self.cu_q.shape != self.cu_k.shape:
            raise ValueError(
                f"Varlen: cu_q and cu_k must have one shape, got {tuple(self.cu_q.shape)} and "
                f"{tuple(self.cu_k.shape)}; give both as many sequences"
            )
        for name in ("max_q", "max_k"):
            longest = getattr(self, name)
            if longest is None:
                continue
            longest = integer(f"Varlen: {name}", longest, "an int, or None to read it from cu_seqlens")
            if longest < 0:
                raise ValueError(f"Varlen: {name} must be >= 0, got {longest}; pass None to have it read")
            object.__setattr__(self, name, longest)

    def to(self, device: torch.device | str | int) -> "Varlen":
        """Return the same layout with cu_q and cu_k on a device."""
        return Varlen(self.cu_q.to(device), self.cu_k.to(device), self.max_q, self.max_k)

    @property
    def key(self) -> Any:
        """Return nothing hashable where a length is read from a tensor, as it may change."""
        return [] if None in (self.max_q, self.max_k) else (self.plain, self.max_q, self.max_k)

    def longest(self) -> tuple[int, int]:
        """Return max_q and max_k, read from the tensors where they are None."""
        return (
            _longest(self.cu_q) if self.max_q is None else self.max_q,
            _longest(self.cu_k) if self.max_k is None else self.max_k,
        )

    def count(self, q: tuple[int, ...]) -> int:
        return self.cu_q.shape[0] - 1

    def sizes(self, q: tuple[int, ...], k: tuple[int, ...], longest: tuple[int, int]) -> Sizes:
        return Sizes(self.count(q), *longest, k[0])

    def check_ranks(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        check_ranks(shapes, 3, "(T, heads, head size)")

    def check_qkv(self, qkv: Tensor) -> None:
        if qkv.ndim != 4 or qkv.shape[-3] != 3:
            raise ValueError(f"qkv must have shape (T, 3, H, D), got {tuple(qkv.shape)}; {AS_ONE}")

    def check(self, problem: Any) -> None:
        self.check_ranks(problem.shapes)
        problem.check_devices(self.named)

    def check_contents(self, p: Any, masks: Sequence[Any]) -> tuple[Any, Any]:
        check_offsets("cu_q", self.cu_q, p.q.shape[0], p.max_q)
        check_offsets("cu_k", self.cu_k, p.k.shape[0], p.max_k)
        return self.cu_q.diff(), self.cu_k.diff()

    def packed(self, p: Any) -> tuple[Any, Any, int, int] | None:
        return self.cu_q, self.cu_k, p.max_q, p.max_k

    def resized(self, p: Any, B: int, M: int, N: int) -> tuple[Any, Any, tuple[tuple[int, ...], ...]]:
        return (p.q.shape[0] + M - p.M,), (p.k.shape[0] + N - p.N,), ((B + 1,), (B + 1,))

    def pairs(self, p: Any) -> int:
        if any(cu.is_meta or is_fake(cu) for cu in (self.cu_q, self.cu_k)):
            return p.B * p.M * p.N
        rows, keys = (cu.long().diff().clamp(0, n) for cu, n in ((self.cu_q, p.M), (self.cu_k, p.N)))
        return int((rows * keys).sum())

    def ends(self, p: Any) -> tuple[list[int], list[int]]:
        return self.cu_q.tolist(), self.cu_k.tolist()


def check_ranks(shapes: Mapping[str, tuple[int, ...]], rank: int, allowed: str) -> None:
    """Raise ValueError unless all shapes have so many dimensions."""
    for name, shape in shapes.items():
        if len(shape) != rank:
            hint = "pass layout=Varlen(...) for packed sequences" if len(shape) == 3 else "reshape it"
            raise ValueError(f"{name} must have shape {allowed}, got {tuple(shape)}; {hint}")


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max().clamp(min=0).item()) if cu.shape[0] > 1 else 0
