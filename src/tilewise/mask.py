"""Attention masks: which keys each query sees. Combine them with `&`.

A mask has a PyTorch form and a kernel form. `keep` is the PyTorch form, for the reference and the CPU. `device` names
the kernel functions in tile/masks.py, `captures` and `shapes` describe the tensors that they read, and `arguments`
returns their arguments. Row indices i are shifted by N - M, so that the last query is aligned with the last key.

In an interval mask, each row sees one interval of keys, given by `keys(i)`. From it follow the tiles to compute.
"""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

OPEN = 1 << 30
"""It means "no bound" at either end of an interval; check.py refuses sequences as long as this."""

Ends = tuple[Any, Any]
INTEGER_TYPES = (torch.int32, torch.int64)


def constant(number: Any) -> Any:
    """Return the number. Under torch.compile, specialise a symbolic one: members of a set are constants."""
    (plain,) = {number}
    return plain


def integer(name: str, number: Any, allowed: str) -> int:
    """Return the number as an int (NumPy's and symbolic ones pass), or raise a TypeError naming what is allowed."""
    if isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool):
        return number  # type: ignore[return-value]
    if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be {allowed}, got {number!r}; convert it with int(...)")
    return operator.index(number)


class Frozen:
    """Instances are equal if they have one class, equal numbers and the very same tensors."""

    @property
    def _fields(self) -> tuple[Any, ...]:
        """Return the arguments the value was made of, in order."""
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
    """Masks and scores derive from this class: they hold plain numbers, and captured tensors that kernels read."""

    device: ClassVar[str]
    """The prefix of the value's kernel functions."""
    captures: ClassVar[tuple[str, ...]] = ()
    """The names of the captured tensors."""
    shapes: ClassVar[tuple[str, ...]] = ()
    """The shape of each captured tensor, by the names of a Problem's sizes: "BN" is (B, N)."""
    broadcasts: ClassVar[bool] = False
    """Whether captured tensors may also have any shape that broadcasts to theirs."""
    unbatched: ClassVar[bool] = False
    """Whether captured tensors may leave out their first dimension, the batch."""
    interval: ClassVar[bool] = True
    """Whether each row sees one interval of keys, whose bounds never decrease as i grows. Scores hide none."""
    varlen: ClassVar[bool] = True
    """Whether the value works where sequences differ in their lengths: packed, or with keys in a cache."""

    @classmethod
    def public_name(cls) -> str:
        """Return the name by which users know the class."""
        return cls.__name__

    @classmethod
    def whole_shapes(cls, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[int, ...]]:
        """Return the shape of each captured tensor with all its dimensions, in a problem with sizes B, H, M and N.

        `numbers` are the value's own, as in `plain`.
        """
        return [tuple([getattr(problem, size) for size in shape]) for shape in cls.shapes]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the captured tensors, in order."""
        return tuple(getattr(self, name) for name in self.captures)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return class name and numbers, hashable. With the tensors, `rebuild` makes the value from them."""
        numbers = [constant(getattr(self, name)) for name in self.__match_args__ if name not in self.captures]  # type: ignore[attr-defined]
        return (type(self).__name__, *numbers)

    @classmethod
    def rebuild(cls: type[V], numbers: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> V:
        """Build the value from its numbers and tensors, without checks."""
        value = object.__new__(cls)
        numbers_left, tensors_left = iter(numbers), iter(tensors)
        for name in cls.__match_args__:  # type: ignore[attr-defined]
            given = tensors_left if name in cls.captures else numbers_left
            object.__setattr__(value, name, next(given))
        return value

    def to(self: V, device: torch.device | str | int) -> V:
        """Return the value with its tensors on a device; itself if it has none."""
        return self.rebuild(self.plain[1:], tuple([t.to(device) for t in self.tensors])) if self.captures else self

    def at(self, b: int, count: int = 1) -> Any:
        """Return the value for `count` batch entries from b on; its tensors keep their batch dimension."""
        if not self.captures:
            return self
        pairs = zip(self.tensors, self.shapes, strict=True)
        entries = [t[b : b + count] if t.ndim == len(whole) and t.shape[0] > 1 else t for t, whole in pairs]
        return self.rebuild(self.plain[1:], tuple(entries))

    def placed(self, place: Any, M: int, N: int) -> Any:
        """Return the value as it is in a call of M rows and N keys at a place (an Origin) of the whole.

        By default it describes the call's own rows and keys, wherever they are.
        """
        return self

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        """Return the arguments of the kernel functions, in their order: numbers, or tensors with strides.

        `problem` has the sizes B, H, M and N.
        """
        return self.plain[1:]

    def check_contents(self, N: Any) -> None:
        """Raise ValueError if the captured tensors hold wrong numbers. This synchronises with a GPU.

        N: the number of keys, or a tensor of one number per batch entry.
        """


class Mask(Value):
    """Every mask derives from this class. `mask & other` shows the keys that both show."""

    lists: tuple["TileList", ...] = ()
    """Lists of its tiles, which `tilewise.listed` has made."""
    held: Any = None
    """Its numbers on the host, where `tilewise.parallel.fixed` has read them."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """Return the masks whose intersection this one is; none for Full."""
        return (self,)

    @property
    def hides_later_keys(self) -> bool:
        """Tell whether the mask hides every key after its query, whatever its tensors hold."""
        return False

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self.parts + other.parts)

    def keys(self, i: Any) -> Ends:
        """Return the first key that row i sees and the one after its last, before clamping to [0, N).

        Only interval masks have it.
        """
        return -OPEN, OPEN

    def ends(self, i: Any, shift: int) -> Ends:
        """Return the same for a mask that may need `shift` = N - M, which i contains, to find the row."""
        return self.keys(i)

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        """Return a bool tensor, broadcast to (B, H, rows, columns): whether row i sees key j.

        i is shifted by `shift` = N - M already.
        """
        lo, hi = self.ends(i, shift)
        return (j >= lo) & (j < hi)

    def dense(self, M: int, N: int) -> Tensor:
        """Return the whole mask as a bool tensor that broadcasts to (B, H, M, N), for the reference and plots."""
        device = next((t.device for part in self.parts for t in part.tensors), torch.device("cpu"))
        i, j = torch.arange(M, device=device)[:, None] + (N - M), torch.arange(N, device=device)[None, :]
        seen = torch.ones(M, N, dtype=torch.bool, device=device)
        for part in self.parts:
            seen = seen & part.keep(i, j, N - M)
        return seen


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Show every key to every query."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Show the keys that all of `masks` show; written `a & b`."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def to(self, device: torch.device | str | int) -> "And":
        return And(tuple([mask.to(device) for mask in self.masks]))


@dataclass(frozen=True, eq=False)
class Listed(Mask):
    """Show what `mask` shows, and carry lists of its tiles. `listed & other` is `mask & other`, whose tiles differ."""

    mask: Mask
    lists: tuple["TileList", ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts

    def to(self, device: torch.device | str | int) -> "Listed":
        return Listed(self.mask.to(device), tuple([one.to(device) for one in self.lists]))


def intersect(parts: tuple[Mask, ...]) -> Mask:
    """Return the intersection of the masks `parts`."""
    return parts[0] if len(parts) == 1 else And(parts) if parts else Full()


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Show query i the keys j <= i + N - M: its own position and all before it.

    The last query is aligned with the last key (bottom-right alignment).
    """

    device = "causal"

    @property
    def hides_later_keys(self) -> bool:
        return True

    def keys(self, i: Any) -> Ends:
        return -OPEN, i + 1


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Show query i the keys j with i + N - M - left <= j <= i + N - M + right: a sliding window.

    left and right are ints >= 0, or None for no limit. Raises TypeError or ValueError for anything else.
    """

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
                raise ValueError(f"Window: {name} must be an int >= 0 or None, got {side}; pass None for an open side")
            object.__setattr__(self, name, constant(side))

    def keys(self, i: Any) -> Ends:
        lo = -OPEN if self.left is None else i - min(self.left, OPEN)
        return lo, OPEN if self.right is None else i + min(self.right, OPEN) + 1

    @property
    def hides_later_keys(self) -> bool:
        return self.right == 0

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return tuple([OPEN if side is None else min(side, OPEN) for side in (self.left, self.right)])


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Show every query the keys j < length of its batch entry, and beyond them be causal (prefix LM).

    lengths: (B,), int32 or int64. Raises TypeError or ValueError for other types or shapes.
    """

    lengths: Tensor
    device = "prefix"
    captures = ("lengths",)
    shapes = ("B",)

    def __post_init__(self) -> None:
        _check_lengths(self, self.lengths)

    def keys(self, i: Any) -> Ends:
        return -OPEN, torch.maximum(_per_batch(self.lengths), torch.as_tensor(i + 1, device=self.lengths.device))

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.lengths.contiguous(),)

    def placed(self, place: Any, M: int, N: int) -> Mask:
        offset = constant(place.row - place.column - (N - M))
        lengths = (_from(self.lengths, place.column, N),)
        return PrefixAt.rebuild((offset,), lengths) if offset else Prefix.rebuild((), lengths)

    def check_contents(self, N: Any) -> None:
        _check_range(self, self.lengths, N)


class At(Value):
    """What derives from this class and from a value is that value at a place: the call's row i is `offset` rows further
    down than its keys say. Its kernel functions take the offset last."""

    offset: int

    @classmethod
    def public_name(cls) -> str:
        return cls.__bases__[-1].__name__

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (*super().arguments(problem), self.offset)


@dataclass(frozen=True, eq=False)
class PrefixAt(At, Prefix):
    """Show what Prefix does, at a place."""

    offset: int
    device = "prefix_at"

    def keys(self, i: Any) -> Ends:
        return super().keys(i + self.offset)


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

    def check(self, name: str, tensor: Any) -> None:
        """Raise TypeError or ValueError for a tensor of another type or shape."""
        _check_lengths(self, tensor, name)

    @staticmethod
    def of(real: Tensor) -> Mask:
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
    device = "padding"
    captures = ("lengths",)
    shapes = ("B",)

    @classmethod
    def public_name(cls) -> str:
        return "Padding"

    def keys(self, i: Any) -> Ends:
        return -OPEN, _per_batch(self.lengths)

    def placed(self, place: Any, M: int, N: int) -> Mask:
        return self.rebuild((), (_from(self.lengths, place.column, N),))

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.lengths.contiguous(),)

    def check_contents(self, N: Any) -> None:
        _check_range(self, self.lengths, N)


@dataclass(frozen=True, eq=False, init=False)
class PaddingRange(Padding):
    """Show the keys start <= j < length: Padding given as lengths (B,) and starts (B,)."""

    lengths: Tensor
    starts: Tensor
    device = "padding_range"
    captures = ("lengths", "starts")
    shapes = ("B", "B")

    @classmethod
    def public_name(cls) -> str:
        return "Padding"

    def keys(self, i: Any) -> Ends:
        return _per_batch(self.starts), _per_batch(self.lengths)

    def placed(self, place: Any, M: int, N: int) -> Mask:
        return self.rebuild((), tuple([_from(t, place.column, N) for t in self.tensors]))

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return self.lengths.contiguous(), self.starts.contiguous()

    def check_contents(self, N: Any) -> None:
        _check_range(self, self.lengths, N)
        _check_range(self, self.starts, N, "starts")


@dataclass(frozen=True, eq=False, init=False)
class PaddingKeys(Padding):
    """Hide padded keys: Padding given as bool (B, N), true where the key is real."""

    real: Tensor
    device = "padding_keys"
    captures = ("real",)
    shapes = ("BN",)
    interval = False
    varlen = False

    @classmethod
    def public_name(cls) -> str:
        return "Padding (bool)"

    def check(self, name: str, tensor: Any) -> None:
        _check_tensor("Padding: keys", tensor, (torch.bool,), "bool")
        if tensor.ndim != 2:
            raise ValueError(
                f"Padding: a bool tensor must have shape (B, N), got {tuple(tensor.shape)}; "
                "give each batch entry a row of keys"
            )

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return self.real[:, None, None, :][..., j[0]]

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.real, *self.real.stride(), problem.N)


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

    def __post_init__(self) -> None:
        for name in self.captures:
            ids = getattr(self, name)
            _check_tensor(f"Documents: {name}", ids, INTEGER_TYPES, "int32 or int64")
            if ids.ndim != 2:
                raise ValueError(
                    f"Documents: {name} must have shape (B, length), got {tuple(ids.shape)}; "
                    "give each batch entry a row of ids"
                )

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        rows, columns = self.q_ids[:, i[:, 0] - shift], self.k_ids[:, j[0]]
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

    def __post_init__(self) -> None:
        _check_tensor("Dense: seen", self.seen, (torch.bool,), "bool")
        if self.seen.ndim > 4:
            raise ValueError(
                f"Dense: seen must broadcast to (B, H, M, N), got {self.seen.ndim} dimensions; reshape it to 4 or fewer"
            )

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        return tile_of(self.seen, i[:, 0] - shift, j[0])

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return (self.seen, *self.seen.expand(problem.B, problem.H, problem.M, problem.N).stride(), problem.M, problem.N)


@dataclass(frozen=True, eq=False)
class Spans(Mask):
    """Show row r of batch entry b the keys lo[b, r] <= j < hi[b, r]: an interval for each row, none where hi <= lo.

    lo and hi: (B, M), int32 or int64, of which neither decreases along a row. Sorted documents, blocks of frames and
    parts of longer sequences are such intervals, and need no lists of tiles. Raises TypeError or ValueError for other
    types or shapes.
    """

    lo: Tensor
    hi: Tensor
    device = "spans"
    captures = ("lo", "hi")
    shapes = ("BM", "BM")
    varlen = False

    def __post_init__(self) -> None:
        for name in self.captures:
            tensor = getattr(self, name)
            _check_tensor(f"Spans: {name}", tensor, INTEGER_TYPES, "int32 or int64")
            if tensor.ndim != 2:
                raise ValueError(
                    f"Spans: {name} must have shape (B, M), got {tuple(tensor.shape)}; give each row one number"
                )

    def ends(self, i: Any, shift: int) -> Ends:
        rows = i[:, 0] - shift if isinstance(i, Tensor) else slice(i - shift, i - shift + 1)
        return self.lo[:, None, rows, None], self.hi[:, None, rows, None]  # (B, 1, rows, 1)

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        return self.lo.contiguous(), self.hi.contiguous(), problem.M, problem.N

    def check_contents(self, N: Any) -> None:
        for name, tensor in zip(self.captures, self.tensors, strict=True):
            if bool((tensor.diff(dim=1) < 0).any()):
                raise ValueError(
                    f"Spans: {name} must never decrease along a row, got {tensor.tolist()}; "
                    "use Dense for a mask that is no such interval"
                )


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


def _per_batch(lengths: Tensor) -> Tensor:
    return lengths[:, None, None, None]  # (B, 1, 1, 1)


def _from(ends: Tensor, column: int, N: int) -> Tensor:
    """Return positions in the whole as positions among N keys that begin at `column`."""
    return (ends - column).clamp(0, N)


def _check_lengths(mask: Mask, lengths: Any, what: str = "lengths") -> None:
    name = mask.public_name()
    _check_tensor(f"{name}: {what}", lengths, INTEGER_TYPES, "int32 or int64")
    if lengths.ndim != 1:
        raise ValueError(
            f"{name}: {what} must have shape (B,), got {tuple(lengths.shape)}; give each batch entry one number"
        )


def _check_range(mask: Mask, lengths: Tensor, N: Any, what: str = "lengths") -> None:
    if bool(((lengths < 0) | (lengths > N)).any()):
        raise ValueError(
            f"{mask.public_name()}: {what} must lie between 0 and the number of keys, got {lengths.tolist()}; "
            "clamp them with .clamp(...)"
        )


def _check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], allowed: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor of type {allowed}, got {type(tensor).__name__}; "
            "convert it with torch.as_tensor(...)"
        )
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}; convert it with .to(...)")
    check_strided(name, tensor)


def check_strided(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor without strides, such as a sparse one."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor, got layout {tensor.layout}; convert it with .to_dense()")
