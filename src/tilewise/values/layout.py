"""Where rows lie other than in a padded batch: packed sequences (Varlen), and keys in a cache (Cached)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from .value import INTEGER_TYPES, Frozen, check_strided, constant, integer

BLOCK = 64
"""What `Cached.invariant` is a multiple of: the keys of one tile, at most."""


@dataclass(frozen=True, eq=False)
class Varlen(Frozen):
    """Packed sequences, one after the other without padding: q (T, H, D), k (T', H_k, D), v (T', H_k, D_v).

    cu_q and cu_k are int32 (B + 1,) on q's device. They start at 0, never decrease, and end at the number of rows or
    before. Sequence b has the rows from cu[b] up to, not including, cu[b + 1]. max_q and max_k are the longest lengths;
    None reads them from the tensors, which synchronises with a GPU.

    Each sequence is one batch entry. Its indices i and j start at 0, and masks and dropout use its own lengths M and N.
    Rows from cu[B] on belong to no sequence: o and all gradients are 0 there, and lse is -inf.

    Raises TypeError or ValueError for a wrong type, shape or number.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int | None = None
    max_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("cu_q", "cu_k"):
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

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return the class name and the names of the tensors, as a recipe holds them."""
        return type(self).__name__, ("cu_q", "cu_k")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that `plain` names."""
        return self.cu_q, self.cu_k

    def to(self, device: torch.device | str | int) -> "Varlen":
        """Return the same layout with cu_q and cu_k on a device."""
        return Varlen(self.cu_q.to(device), self.cu_k.to(device), self.max_q, self.max_k)

    def longest(self) -> tuple[int, int]:
        """Return max_q and max_k, read from the tensors where they are None."""
        return (
            _longest(self.cu_q) if self.max_q is None else self.max_q,
            _longest(self.cu_k) if self.max_k is None else self.max_k,
        )


@dataclass(frozen=True, eq=False)
class Cached(Frozen):
    """Keys and values in a cache, contiguous or in pages, for inference: gradients are refused.

    Without `table`, k is (entries, capacity, H_k, D) and v (entries, capacity, H_k, D_v): sequence b has the rows of
    entry `index[b]`, or b. With `table`, k is (pages, P, H_k, D) and v (pages, P, H_k, D_v), and row r of sequence b is
    row r % P of page `table[index[b] or b, r // P]`. k and v may have any strides.

    Sequence b has the keys in rows starts[b] <= r < lengths[b]. Their indices are j = r - starts[b], and there are
    N_b = lengths[b] - starts[b] of them. Masks and scores use N_b and the sequence's own number of queries, so its last
    query is aligned with its last key. No other row is read, and no entry of `table` that no query's keys need.

    Args:
        lengths: (B,) on q's device, the rows in use, with those that `append_` writes before the call. A length above
            the capacity is cut to it.
        table: (B, width) on q's device, the pages of each sequence, in order; sequences may share pages. Capacity is
            width * P.
        starts: (B,), the first row in use, for sequences padded on the left; None for 0.
        cu_q: (B + 1,), as in `Varlen`: q is packed (T, H, D). None: q is (B, M, H, D). In rows from cu_q[B] on, o is 0
            and lse -inf.
        max_q: the largest number of queries of a sequence, with cu_q. It chooses tiles and bounds nothing; None is T.
        index: (B,), the entry of k and v, or the row of `table`, in which a sequence lies; they may repeat. None for b.
        invariant: 0, or a multiple of 64. Then keys are summed in pieces of that many rows, so a sequence's results
            have the same bits in any batch, with any number of programs, and however its queries are cut into calls.

    Tensors are int32; of int64 a converted copy is made here, which does not follow later changes.

    Raises TypeError or ValueError for a wrong type, shape or number.
    """

    lengths: Tensor
    table: Tensor | None = None
    _: KW_ONLY
    starts: Tensor | None = None
    cu_q: Tensor | None = None
    max_q: int | None = None
    index: Tensor | None = None
    invariant: int = 0
    __match_args__ = ("lengths", "table", "starts", "cu_q", "max_q", "index", "invariant")

    def __post_init__(self) -> None:
        shape = tuple(self.lengths.shape) if isinstance(self.lengths, Tensor) else ()
        B = shape[0] if shape else 0
        for name, dims, rows in (
            ("lengths", 1, B), ("table", 2, B), ("starts", 1, B), ("cu_q", 1, B + 1), ("index", 1, B),
        ):  # fmt: skip
            if getattr(self, name) is not None or name == "lengths":
                shared = name == "table" and self.index is not None
                object.__setattr__(self, name, _integers(name, getattr(self, name), dims, None if shared else rows))
        if self.max_q is not None:
            if self.cu_q is None:
                raise ValueError(f"Cached: max_q must be None without cu_q, got {self.max_q}; leave it out")
            longest = integer("Cached: max_q", self.max_q, "an int >= 0, or None for the number of q's rows")
            if longest < 0:
                raise ValueError(f"Cached: max_q must be >= 0, got {longest}; pass None for the number of q's rows")
            object.__setattr__(self, "max_q", longest)
        piece = constant(integer("Cached: invariant", self.invariant, f"0 or a multiple of {BLOCK}"))
        if piece < 0 or piece % BLOCK:
            raise ValueError(f"Cached: invariant must be 0 or a multiple of {BLOCK}, got {piece}; pass 1024, say")
        object.__setattr__(self, "invariant", piece)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return class name, the names of the tensors that are there, and `invariant`, as a recipe holds them."""
        there = [name for name in ("lengths", "table", "starts", "cu_q", "index") if getattr(self, name) is not None]
        return type(self).__name__, tuple(there), self.invariant

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that `plain` names."""
        return tuple([t for t in (self.lengths, self.table, self.starts, self.cu_q, self.index) if t is not None])

    def to(self, device: torch.device | str | int) -> "Cached":
        """Return the same layout with its tensors on a device."""
        moved = {name: t.to(device) for name, t in zip(self.plain[1], self.tensors, strict=True)}
        return Cached(**moved, max_q=self.max_q, invariant=self.invariant)

    def longest(self) -> tuple[int, int]:
        """Return max_q, or 0 for the number of q's rows, and 0: the shapes of k, v and table bound the keys."""
        return self.max_q or 0, 0


def _integers(name: str, t: Any, dims: int, rows: int | None) -> Tensor:
    """Return one of Cached's tensors as int32. It has `dims` dimensions, and if given so many `rows`."""
    shape = "(B, width)" if dims == 2 else "(B + 1,)" if name == "cu_q" else "(B,)"
    if not isinstance(t, Tensor):
        raise TypeError(
            f"Cached: {name} must be an int32 tensor of shape {shape}, got {type(t).__name__}; "
            "convert it with torch.tensor(..., dtype=torch.int32)"
        )
    if t.dtype not in INTEGER_TYPES:
        raise TypeError(f"Cached: {name} must be int32 or int64, got {t.dtype}; convert it with .to(torch.int32)")
    check_strided(f"Cached: {name}", t)
    if t.ndim != dims or (rows is not None and t.shape[0] != rows):
        hint = "give each sequence one row" if dims == 2 else "give each sequence one number, and cu_q one more"
        raise ValueError(f"Cached: {name} must have shape {shape}, got {tuple(t.shape)}; {hint}")
    return t.to(torch.int32)


Layout = Varlen | Cached
"""What the option `layout` takes, or None."""


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max().clamp(min=0).item()) if cu.shape[0] > 1 else 0
