"""Mask values: which keys a query sees. They compose with `&`.

A mask says the same thing three times: `keep` in torch for the reference and the CPU, `device` names the functions in
tile/masks.py for the kernels, and `captures` names the tensors those functions read. Rows i are shifted by N - M, so
that the last query is aligned with the last key.

A mask that shows each row one interval of keys also has `keys(i)`: from it every tile to visit follows.
"""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

OPEN = 1 << 30
"""An end that is not there; describe.py refuses lengths that reach it."""

Ends = tuple[Any, Any]
INTEGER_TYPES = (torch.int32, torch.int64)


def constant(number: Any) -> Any:
    """The number itself. Under torch.compile a symbolic one is specialised, as a set's members are constants."""
    (plain,) = {number}
    return plain


def integer(name: str, number: Any, allowed: str) -> int:
    """The number as an int, NumPy's and symbolic ones, too; a TypeError that says what is allowed for what is none."""
    if isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool):
        return number  # type: ignore[return-value]
    if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} is {number!r}; it must be {allowed}")
    return operator.index(number)


class Frozen:
    """Equal to what is of the same class and has equal numbers and the very same tensors."""

    @property
    def _fields(self) -> tuple[Any, ...]:
        """What the value was made of, in order."""
        return tuple([getattr(self, name) for name in getattr(self, "__match_args__", ())])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = zip(self._fields, other._fields, strict=True)
        return all([a is b or (not isinstance(a, Tensor) and a == b) for a, b in pairs])

    def __hash__(self) -> int:
        return hash((type(self), *[id(field) if isinstance(field, Tensor) else field for field in self._fields]))


V = TypeVar("V", bound="Value")


class Value(Frozen):
    """What masks and scores share: plain numbers on one side, captured tensors on the other."""

    device: ClassVar[str]
    captures: ClassVar[tuple[str, ...]] = ()
    batched: ClassVar[int] = 0
    """How many dimensions a captured tensor has where its first is the batch."""
    varlen: ClassVar[bool] = True
    """Whether the value makes sense for packed sequences."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors, in order."""
        return tuple(getattr(self, name) for name in self.captures)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Class name and numbers: hashable, and with the tensors enough to build the value again."""
        numbers = [constant(getattr(self, name)) for name in self.__match_args__ if name not in self.captures]  # type: ignore[attr-defined]
        return (type(self).__name__, *numbers)

    @classmethod
    def rebuild(cls: type[V], numbers: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> V:
        """The value that had these numbers and tensors, without checking them again."""
        value = object.__new__(cls)
        numbers_left, tensors_left = iter(numbers), iter(tensors)
        for name in cls.__match_args__:  # type: ignore[attr-defined]
            given = tensors_left if name in cls.captures else numbers_left
            object.__setattr__(value, name, next(given))
        return value

    def to(self: V, device: torch.device | str | int) -> V:
        """This value with its tensors on a device; itself if it has none."""
        return self.rebuild(self.plain[1:], tuple([t.to(device) for t in self.tensors])) if self.captures else self

    def at(self, b: int, count: int = 1) -> Any:
        """This value for `count` batch entries from b on, its tensors keeping their batch dimension."""
        if not self.captures:
            return self
        return self.rebuild(self.plain[1:], tuple(self._slice(t, slice(b, b + count)) for t in self.tensors))

    def _slice(self, tensor: Tensor, entries: slice) -> Tensor:
        return tensor[entries] if tensor.shape[0] > 1 else tensor


class Mask(Value):
    """Base of all masks. `mask & other` shows what both show."""

    interval: ClassVar[bool] = True
    """Whether each row sees one interval of keys whose ends never move left as i grows."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks this one is the intersection of; none for Full."""
        return (self,)

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self.parts + other.parts)

    def keys(self, i: Any) -> Ends:
        """First key that row i sees and the one after its last, before clamping to [0, N); interval masks only."""
        return -OPEN, OPEN

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        """Bool, broadcast to (B, H, rows, columns): whether row i (shifted by `shift` = N - M) sees key j."""
        lo, hi = self.keys(i)
        return (j >= lo) & (j < hi)

    def dense(self, M: int, N: int) -> Tensor:
        """The whole mask as bool, broadcast to (B, H, M, N): for the reference, for drawing, for reading."""
        device = next((t.device for part in self.parts for t in part.tensors), torch.device("cpu"))
        i, j = torch.arange(M, device=device)[:, None] + (N - M), torch.arange(N, device=device)[None, :]
        seen = torch.ones(M, N, dtype=torch.bool, device=device)
        for part in self.parts:
            seen = seen & part.keep(i, j, N - M)
        return seen


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key."""

    device = "full"

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class And(Mask):
    """What all of `masks` show; written `a & b`."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def to(self, device: torch.device | str | int) -> "And":
        return And(tuple([mask.to(device) for mask in self.masks]))


def intersect(parts: tuple[Mask, ...]) -> Mask:
    """The mask that shows what all `parts` show."""
    return parts[0] if len(parts) == 1 else And(parts) if parts else Full()


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """j <= i + N - M: a query sees its own position and what came before, aligned to the last key."""

    device = "causal"

    def keys(self, i: Any) -> Ends:
        return -OPEN, i + 1


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """i + N - M - left <= j <= i + N - M + right; ints >= 0, or None for an open side."""

    left: int | None
    right: int | None
    device = "window"

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is None:
                continue
            side = integer(f"Window: {name}", side, "an int >= 0, or None for an open side")
            if side < 0:
                raise ValueError(f"Window: {name} is {side}; it must be >= 0, or None for an open side")
            object.__setattr__(self, name, constant(side))

    def keys(self, i: Any) -> Ends:
        lo = -OPEN if self.left is None else i - min(self.left, OPEN)
        return lo, OPEN if self.right is None else i + min(self.right, OPEN) + 1


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """j < length, or causal: a prefix that all see, then left to right. lengths (B,), int32 or int64."""

    lengths: Tensor
    device = "prefix"
    captures = ("lengths",)
    batched = 1

    def __post_init__(self) -> None:
        _check_lengths(self, self.lengths)

    def keys(self, i: Any) -> Ends:
        return -OPEN, torch.maximum(_per_batch(self.lengths), torch.as_tensor(i + 1, device=self.lengths.device))


class Padding(Mask):
    """Hides padded keys, not queries: lengths (B,), int32 or int64, or bool (B, N), true where the key is real."""

    def __new__(cls, keys: Tensor | None = None) -> "Padding":
        by_key = isinstance(keys, Tensor) and keys.dtype == torch.bool
        return object.__new__(cls if cls is not Padding else PaddingKeys if by_key else PaddingLengths)

    def __init__(self, keys: Tensor) -> None:
        (name,) = self.captures
        object.__setattr__(self, name, keys)
        self.check(keys)

    def check(self, keys: Tensor) -> None:
        """TypeError or ValueError for what is not of this kind."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, init=False)
class PaddingLengths(Padding):
    """j < length: Padding given as lengths (B,)."""

    lengths: Tensor
    device = "padding"
    captures = ("lengths",)
    batched = 1

    def check(self, keys: Tensor) -> None:
        _check_lengths(self, keys, name="Padding")

    def keys(self, i: Any) -> Ends:
        return -OPEN, _per_batch(self.lengths)


@dataclass(frozen=True, eq=False, init=False)
class PaddingKeys(Padding):
    """Padding given as bool (B, N), true where the key is real."""

    real: Tensor
    device = "padding_keys"
    captures = ("real",)
    batched = 2
    interval = False
    varlen = False

    def check(self, keys: Tensor) -> None:
        check_strided("Padding", keys)
        if keys.ndim != 2:
            raise ValueError(f"Padding: a bool tensor must have shape (B, N), got {tuple(keys.shape)}")

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return self.real[:, None, None, :][..., j[0]]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Equal ids see each other: q_ids (B, M) and k_ids (B, N), int32 or int64. Other documents' tiles are skipped."""

    q_ids: Tensor
    k_ids: Tensor
    device = "documents"
    captures = ("q_ids", "k_ids")
    batched = 2
    interval = False
    varlen = False

    def __post_init__(self) -> None:
        for name in self.captures:
            ids = getattr(self, name)
            _check_tensor(f"Documents: {name}", ids, INTEGER_TYPES, "int32 or int64")
            if ids.ndim != 2:
                raise ValueError(f"Documents: {name} must have shape (B, length), got {tuple(ids.shape)}")

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        rows, columns = self.q_ids[:, i[:, 0] - shift], self.k_ids[:, j[0]]
        return (rows[:, :, None] == columns[:, None, :])[:, None]


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Any boolean mask, true where the query sees the key; broadcast to (B, H, M, N). Empty tiles are skipped."""

    seen: Tensor
    device = "dense"
    captures = ("seen",)
    batched = 4
    interval = False
    varlen = False

    def __post_init__(self) -> None:
        _check_tensor("Dense: seen", self.seen, (torch.bool,), "bool")
        if self.seen.ndim > 4:
            raise ValueError(f"Dense: seen must broadcast to (B, H, M, N), got {self.seen.ndim} dimensions")

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return tile_of(self.seen, i[:, 0] - shift, j[0])

    def _slice(self, tensor: Tensor, entries: slice) -> Tensor:
        return slice_batch(tensor, entries)


def tile_of(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The given rows and columns of a tensor that broadcasts to (B, H, M, N)."""
    tensor = tensor[(None,) * (4 - tensor.ndim)]
    rows = rows if tensor.shape[2] > 1 else torch.zeros_like(rows[:1])
    columns = columns if tensor.shape[3] > 1 else torch.zeros_like(columns[:1])
    return tensor[:, :, rows[:, None], columns[None, :]]


def slice_batch(tensor: Tensor, entries: slice) -> Tensor:
    """Some batch entries of a tensor that broadcasts to (B, H, M, N)."""
    return tensor[entries] if tensor.ndim == 4 and tensor.shape[0] > 1 else tensor


def _per_batch(lengths: Tensor) -> Tensor:
    return lengths[:, None, None, None]  # (B, 1, 1, 1)


def _check_lengths(mask: Mask, lengths: Tensor, name: str | None = None) -> None:
    name = name or type(mask).__name__
    _check_tensor(f"{name}: lengths", lengths, INTEGER_TYPES, "int32 or int64")
    if lengths.ndim != 1:
        raise ValueError(f"{name}: lengths must have shape (B,), got {tuple(lengths.shape)}")


def _check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], allowed: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a {allowed} tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}; convert it with .to(...)")
    check_strided(name, tensor)


def check_strided(name: str, tensor: Tensor) -> None:
    """ValueError for a sparse tensor and its like, whose numbers lie elsewhere."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor, got layout {tensor.layout}; convert it with .to_dense()")
