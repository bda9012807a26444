"""Masks of intervals: each row sees one interval of keys, given by `keys(i)`. From it follow the tiles to compute.

Padding by bools, whose keys may be several runs, is here beside its siblings; its `interval` is false.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .masks import Full, Mask
from .value import ALL, AS_WIDE, INTEGER_TYPES, OPEN, At, Ends, check_ranks, check_type, constant, integer, per_batch

FAR = OPEN - 1
"""No row is so far from a key. As 2 n + 1, a kernel still takes it in 32 bits."""


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Show query i the keys j <= i + N - M: its own position and all before it.

    The last query is aligned with the last key (bottom-right alignment).
    """

    @staticmethod
    def rule(b, h, i, j):
        return j <= i

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        return -OPEN, i + 1


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Show query i the keys j with i + N - M - left <= j <= i + N - M + right: a sliding window.

    left and right are ints >= 0, or None for no limit. Raises TypeError or ValueError for anything else.
    """

    left: int | None
    right: int | None

    @staticmethod
    def rule(b, h, i, j, left, right):
        return (i - left <= j) & (j <= i + right)

    @property
    def rule_takes(self) -> tuple[Any, ...]:
        return tuple([FAR if side is None else min(side, FAR) for side in (self.left, self.right)])

    def __post_init__(self) -> None:
        for name in [name for name in ("left", "right") if getattr(self, name) is not None]:
            side = integer(f"Window: {name}", getattr(self, name), "an int >= 0, or None for an open side")
            if side < 0:
                raise ValueError(f"Window: {name} must be an int >= 0 or None, got {side}; pass None for an open side")
            object.__setattr__(self, name, constant(side))

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        lo = -OPEN if self.left is None else i - min(self.left, OPEN)
        return lo, OPEN if self.right is None else i + min(self.right, OPEN) + 1

    @property
    def hides_later_keys(self) -> bool:
        return self.right == 0


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Show every query the keys j < length of its batch entry, and beyond them be causal (prefix LM).

    lengths: (B,), int32 or int64. Raises TypeError or ValueError for other types or shapes.
    """

    lengths: Tensor
    captures = ("lengths",)
    shapes = ("B",)

    @staticmethod
    def rule(b, h, i, j, lengths):
        return (j < lengths[b]) | (j <= i)

    def __post_init__(self) -> None:
        _check_lengths(self, self.lengths)

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        return -OPEN, torch.maximum(per_batch(self.lengths[b]), torch.as_tensor(i + 1, device=self.lengths.device))

    def placed(self, place: Any, M: int, N: int) -> Mask:
        offset = constant(place.row - place.column - (N - M))
        lengths = (_from(self.lengths, place.column, N),)
        return PrefixAt.rebuild((offset,), lengths) if offset else Prefix.rebuild((), lengths)

    def check_contents(self, M: Any, N: Any) -> None:
        _check_range(self, self.lengths, N)


@dataclass(frozen=True, eq=False)
class PrefixAt(At, Prefix):
    """Show what Prefix does, at a place."""

    offset: int

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        return super().keys(i + self.offset, b)


class Padding(Mask):
    """Hide padded keys; queries stay.

    keys: lengths (B,), int32 or int64; or bool (B, N), true where the key is real.
    starts: (B,), int32 or int64, with lengths: also hide the keys j < start, for batches that are padded on the left.

    The last query stays aligned with the last key, whatever is hidden. Raises TypeError or ValueError for other types
    or shapes.
    """

    def __new__(cls, keys: Tensor | None = None, starts: Tensor | None = None) -> "Padding":
        by_key = isinstance(keys, Tensor) and keys.dtype == torch.bool
        kind = PaddingKeys if by_key else PaddingLengths if starts is None else PaddingRange
        return object.__new__(cls if cls is not Padding else kind)

    def __init__(self, keys: Tensor, starts: Tensor | None = None) -> None:
        if starts is not None and len(self.captures) == 1:
            raise ValueError(
                "Padding: starts must be None with a bool tensor, got both; leave starts out, or pass lengths"
            )
        for name, tensor in zip(self.captures, (keys, starts), strict=False):
            object.__setattr__(self, name, tensor)
            self.check(name, tensor)

    @classmethod
    def public_name(cls) -> str:
        return "Padding"

    def check(self, name: str, tensor: Any) -> None:
        """Raise TypeError or ValueError for a tensor of another type or shape."""
        _check_lengths(self, tensor, name)

    @staticmethod
    def of(real: Tensor) -> Mask:  # type: ignore[override]  # it had this name before Mask.of
        """Return the cheapest mask that hides padded keys. This synchronises with a GPU, once.

        real: bool (B, N), true where the key is real. The result is Full if all are, an interval mask if each row's
        real keys are one run (lengths, or lengths and starts), else Padding(real). Raises TypeError or ValueError for
        other types or shapes.
        """
        by_key = PaddingKeys(real)
        whole, prefix, run = torch.stack(padding_facts(real)).tolist()
        return Full() if whole else padding_run(real, prefix) if run else by_key


def padding_facts(real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether, in every row of bool (B, N), all are true; the true ones are a prefix; they are one run."""
    steps = real[:, 1:].int() - real[:, :-1].int()  # (B, N - 1)
    begins = (steps > 0).sum(1) + real[:, :1].sum(1)
    return real.all(), (steps <= 0).all(), (begins <= 1).all()


def padding_run(real: Tensor, prefix: bool) -> Padding:
    """Return the interval mask of bool (B, N) whose rows' true entries are one run each; `prefix`: from 0 on."""
    lengths = real.sum(1, dtype=torch.int32)
    if prefix:
        return PaddingLengths(lengths)
    starts = torch.zeros_like(lengths) if real.shape[1] == 0 else real.int().argmax(1).int()
    return PaddingRange(starts + lengths, starts)


@dataclass(frozen=True, eq=False, init=False)
class PaddingLengths(Padding):
    """Show the keys j < length: Padding given as lengths (B,)."""

    lengths: Tensor
    captures = ("lengths",)
    shapes = ("B",)

    @staticmethod
    def rule(b, h, i, j, lengths):
        return j < lengths[b]

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        return -OPEN, per_batch(self.lengths[b])

    def placed(self, place: Any, M: int, N: int) -> Mask:
        return self.rebuild((), tuple([_from(t, place.column, N) for t in self.tensors]))

    def check_contents(self, M: Any, N: Any) -> None:
        for name in self.captures:
            _check_range(self, getattr(self, name), N, name)


@dataclass(frozen=True, eq=False, init=False)
class PaddingRange(PaddingLengths):
    """Show the keys start <= j < length: Padding given as lengths (B,) and starts (B,)."""

    starts: Tensor
    captures = ("lengths", "starts")
    shapes = ("B", "B")

    @staticmethod
    def rule(b, h, i, j, lengths, starts):
        return (starts[b] <= j) & (j < lengths[b])

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        return per_batch(self.starts[b]), per_batch(self.lengths[b])


@dataclass(frozen=True, eq=False, init=False)
class PaddingKeys(Padding):
    """Hide padded keys: Padding given as bool (B, N), true where the key is real."""

    real: Tensor
    captures = ("real",)
    shapes = ("BN",)
    interval = False
    varlen = False
    not_cached = AS_WIDE

    @staticmethod
    def rule(b, h, i, j, real):
        return real[b, j]

    @classmethod
    def public_name(cls) -> str:
        return "Padding (bool)"

    def check(self, name: str, tensor: Any) -> None:
        check_type("Padding: keys", tensor, (torch.bool,), "bool")
        check_ranks("Padding: a bool tensor", tensor, (2,), "have shape (B, N)", "give each batch entry a row of keys")


@dataclass(frozen=True, eq=False)
class Spans(Mask):
    """Show each row an interval of keys, lo <= j < hi, or several; none where hi <= lo.

    lo and hi: (B, M), int32 or int64, of which neither decreases along a row: row r of batch entry b sees the keys
    lo[b, r] <= j < hi[b, r]. Sorted documents, blocks of frames and parts of longer sequences are such intervals, and
    need no lists of tiles. Or (B or 1, H or 1, M, K), in any order: row r of head h sees what is in one of the K
    intervals from lo[b, h, r, k] to hi[b, h, r, k]. Raises TypeError or ValueError for other types or shapes.
    """

    lo: Tensor
    hi: Tensor
    device = "spans"
    captures = ("lo", "hi")
    shapes = ("BM", "BM")
    varlen = False
    align = "first"
    of_ranks: ClassVar[dict[int, type]] = {}
    """Other classes, by the number of dimensions of lo."""

    @staticmethod
    def rule(b, h, i, j, lo, hi):
        return (lo[b, i] <= j) & (j < hi[b, i])

    def __new__(cls, lo: Any = None, hi: Any = None) -> "Spans":
        return object.__new__(cls.of_ranks.get(getattr(lo, "ndim", 2), cls) if cls is Spans else cls)

    def __post_init__(self) -> None:
        for name in self.captures:
            tensor = getattr(self, name)
            check_type(f"Spans: {name}", tensor, INTEGER_TYPES, "int32 or int64")
            shape, remedy = "have shape (B, M) or (B, H, M, K), as lo has", "give each row a number, or in each head K"
            check_ranks(f"Spans: {name}", tensor, (len(self.shapes[0]),), shape, remedy)

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return self.lo.contiguous(), self.hi.contiguous(), problem.M, problem.N

    def check_contents(self, M: Any, N: Any) -> None:
        for name, tensor in zip(self.captures, self.tensors, strict=True):
            own = torch.arange(1, max(1, tensor.shape[1]), device=tensor.device) < torch.as_tensor(M)[..., None]
            if bool(((tensor.diff(dim=1) < 0) & own).any()):
                raise ValueError(
                    f"Spans: {name} must never decrease along a row, got {tensor.tolist()}; "
                    "use Dense for a mask that is no such interval"
                )


def _from(ends: Tensor, column: int, N: int) -> Tensor:
    """Return positions in the whole as positions among N keys that begin at `column`."""
    return (ends - column).clamp(0, N)


def _check_lengths(mask: Mask, lengths: Any, what: str = "lengths") -> None:
    name = mask.public_name()
    check_type(f"{name}: {what}", lengths, INTEGER_TYPES, "int32 or int64")
    check_ranks(f"{name}: {what}", lengths, (1,), "have shape (B,)", "give each batch entry one number")


def _check_range(mask: Mask, lengths: Tensor, N: Any, what: str = "lengths") -> None:
    if bool(((lengths < 0) | (lengths > N)).any()):
        raise ValueError(
            f"{mask.public_name()}: {what} must lie between 0 and the number of keys, got {lengths.tolist()}; "
            "clamp them with .clamp(...)"
        )
