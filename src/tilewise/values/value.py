"""Value: what masks, scores, layouts and the other options of a call derive from.

A value holds plain numbers, and captured tensors that kernels read.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..program import Aligned, decode
from ..program.place import moved

OPEN = 1 << 30
"""It means "no bound" at either end of an interval; check.py refuses sequences as long as this."""

ALL = slice(None)
Ends = tuple[Any, Any]
INTEGER_TYPES = (torch.int32, torch.int64)
FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


AS_WIDE = "its tensor would need a column for every row of the cache's capacity"
"""Why a value with a number for each key does not go with keys in a cache."""


class Unsupported(NotImplementedError, ValueError):  # noqa: N818, users type this name
    """No back end can run the call, or the requested one cannot; the message gives the reasons and a remedy.

    It is a ValueError, and through NotImplementedError a RuntimeError, which users of other libraries may catch.
    """


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


def number_in(name: str, number: Any, allowed: str, low: float, high: float) -> float:
    """Return a finite float in [low, high), or raise an error that names the argument."""
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be {allowed}, got {number!r}; pass a number, or leave it out")
    number = constant(float(number))
    if not (math.isfinite(number) and low <= number < high):
        raise ValueError(f"{name} must be {allowed}, got {number}; leave it out for the default")
    return number


COMPUTED = ("captured", "key")
"""What values compute once, outside of graphs: Dynamo does not trace the lock of a cached property."""


class Frozen:
    """Instances are equal if they have one class, equal numbers and the very same tensors."""

    @property
    def _fields(self) -> tuple[Any, ...]:
        """Return the arguments the value was made of, in order."""
        return tuple([getattr(self, name) for name in getattr(self, "__match_args__", ())])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out of a pickle what is computed once."""
        return {name: value for name, value in vars(self).items() if name not in COMPUTED}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = zip(self._fields, other._fields, strict=True)
        return all([a is b or (not isinstance(a, Tensor) and a == b) for a, b in pairs])

    def __hash__(self) -> int:
        return hash((type(self), *[id(field) if isinstance(field, Tensor) else field for field in self._fields]))


O = TypeVar("O", bound="Option")
V = TypeVar("V", bound="Value")


class Option(Frozen):
    """Layouts and products derive from this class: they have numbers, and tensors some of which may be absent.

    A Problem holds one with TensorSpecs in place of tensors, from which methods read shapes alone, unless they say so.
    """

    captures: ClassVar[tuple[str, ...]] = ()
    """The names of all tensors, in order."""
    numbers: ClassVar[tuple[str, ...]] = ()
    """The names of what a recipe holds beside tensors."""
    ranks: ClassVar[Mapping[str, int]] = {}
    """The number of dimensions of those tensors whose first is the batch."""
    no_gradients: ClassVar[str] = ""
    """Why the option is for inference alone, as users read it; nothing if it has gradients."""

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return class name, the names of the tensors that are there, and the numbers, as a recipe holds them."""
        there = tuple([name for name in self.captures if getattr(self, name) is not None])
        return type(self).__name__, there, *[getattr(self, name) for name in self.numbers]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return the tensors that are there, in order."""
        return tuple([t for name in self.captures if (t := getattr(self, name)) is not None])

    @property
    def named(self) -> dict[str, Any]:
        """Return the tensors that are there, by the names by which errors call them."""
        return {f"{type(self).__name__}: {name}": t for name, t in zip(self.plain[1], self.tensors, strict=True)}

    @classmethod
    def rebuild(cls: type[O], plain: tuple[Any, ...], tensors: Sequence[Any]) -> O:
        """Build the option from what a recipe holds and its tensors, or their specs, without checks."""
        option = object.__new__(cls)
        for name, found in zip((*plain[1], *cls.numbers), (*tensors, *plain[2:]), strict=True):
            object.__setattr__(option, name, found)
        return option

    @cached_property
    def key(self) -> Any:
        """Return all that the option says but its tensors, hashable."""
        return self.plain

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        """Return the tensors that a call gets."""
        return self.tensors

    def check(self, problem: Any) -> None:
        """Raise a TypeError or ValueError if shapes, types and devices do not fit a problem, whose option this is."""

    def check_lengths(self, problem: Any) -> None:
        """Raise a ValueError if lengths do not fit. Symbolic ones are not checked: they would bind a graph."""

    def refuse_gradients(self, *tensors: Tensor) -> None:
        """Raise Unsupported if the option is for inference alone, and a gradient is wanted."""
        if self.no_gradients and torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
            raise Unsupported(self.no_gradients)


class Value(Frozen):
    """Masks and scores derive from this class: they hold plain numbers, and captured tensors that kernels read."""

    device: ClassVar[str] = ""
    """The prefix of kernel functions written by hand (tile/masks.py), for what no rule says as well."""
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
    learns: ClassVar[bool] = False
    """Whether captured tensors get gradients."""
    unbounded: ClassVar[bool] = False
    """Whether logits may be of any size after it, as after a bias."""
    reads_batch: ClassVar[bool] = False
    """Whether it reads numbers of batch entries other than by tensors with a batch dimension."""
    varlen: ClassVar[bool] = True
    """Whether it has no tables of rows and keys: such a table is of the longest packed sequence, and of no cache."""
    not_cached: ClassVar[str] = "it is for one number of queries and of keys, and a cache's sequences differ in theirs"
    """Why the value does not go with keys in a cache, if it does not."""

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

    @classmethod
    def fits(cls, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """Tell whether a captured tensor may have a shape, where `whole` is that with all dimensions."""
        if cls.broadcasts:
            return len(shape) <= len(whole) and all(s in (1, w) for s, w in zip(shape[::-1], whole[::-1], strict=False))
        return tuple(shape) == whole or (cls.unbatched and tuple(shape) == whole[1:])

    @classmethod
    def allowed(cls, n: int, whole: tuple[int, ...]) -> str:
        """Say which shapes captured tensor n may have."""
        if cls.broadcasts:
            return f"broadcast to ({', '.join(cls.shapes[n])}) = {whole}"
        return f"have shape {f'{whole[1:]} or {whole}' if cls.unbatched else whole}"

    @classmethod
    def limit(cls, numbers: tuple[Any, ...]) -> float | None:
        """Return what bounds the size of the logits that a score of these numbers returns, if anything."""
        return None

    def sizes(self, letter: str) -> list[int]:
        """Return the sizes of those dimensions of its tensors that `shapes` names by a letter."""
        pairs = zip(self.tensors, self.shapes, strict=True)
        return [n for t, shape in pairs for n, c in zip(t.shape[::-1], shape[::-1], strict=False) if c == letter]

    @classmethod
    def batched_ranks(cls) -> list[int | None]:
        """Return the number of dimensions of each captured tensor if the first is the batch, else None."""
        return [len(shape) for shape in cls.shapes]

    @classmethod
    def varies_with(cls, given: Sequence[tuple[int, ...]]) -> set[str]:
        """Return of "B" and "H" what the value differs for, with captured tensors of the shapes given."""
        pairs = zip(cls.shapes, given, strict=True)
        sizes = [pair for whole, shape in pairs for pair in zip(reversed(whole), reversed(shape), strict=False)]
        return {letter for letter, size in sizes if letter in "BH" and size != 1}

    @classmethod
    def against_cache(cls) -> str:
        """Return why the value does not go with keys in a cache; nothing if it does."""
        return "" if cls.varlen else cls.not_cached

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the captured tensors, in order."""
        return tuple(getattr(self, name) for name in self.captures)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return class name and numbers, hashable. With the tensors, `rebuild` makes the value from them."""
        numbers = [constant(getattr(self, name)) for name in self.__match_args__ if name not in self.captures]  # type: ignore[attr-defined]
        return (type(self).__name__, *numbers)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return all that the value says but its tensors, hashable."""
        return type(self), self.plain

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        """Return the tensors that a call gets."""
        return self.tensors if self.captures else ()

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

    def of_heads(self, h: slice) -> Any:
        """Return the value for some heads only."""
        if not any(["H" in shape for shape in self.shapes]):
            return self
        cut = [_of_heads(t, shape, h) for t, shape in zip(self.tensors, self.shapes, strict=True)]
        return self.rebuild(self.plain[1:], tuple(cut))

    def placed(self, place: Any, M: int, N: int) -> Any:
        """Return the value as it is in a call of M rows and N keys at a place (an Origin) of the whole.

        By default it describes the call's own rows and keys, wherever they are.
        """
        return self.of_part(place)

    def of_part(self, place: Any) -> Any:
        """Return the value as it is in a call of some batch entries and heads of the whole, at a place (an Origin).

        By default its tensors are those of the call.
        """
        return self

    def check_contents(self, M: Any, N: Any) -> None:
        """Raise ValueError if the captured tensors hold wrong numbers. This synchronises with a GPU.

        M, N: the numbers of queries and keys, or tensors of one number per batch entry.
        """


class At(Value):
    """What derives from this class and from a value is that value at a place: the call's row i is `offset` rows further
    down than its keys say."""

    offset: int

    @property
    def rule_takes(self) -> tuple[Any, ...]:
        return self._fields[:-1]

    @property
    def traced(self) -> Any:
        """Return the program, in which i is the row at the place."""
        program, tensors, numbers, align = super().traced  # type: ignore[misc]
        text, _ = moved(program.text, len(numbers), ("i",))
        return Aligned(decode(text), tensors, (*numbers, self.offset), align)

    @classmethod
    def public_name(cls) -> str:
        return cls.__bases__[-1].__name__


def _of_heads(t: Tensor, shape: str, h: slice) -> Tensor:
    """Return some heads of a tensor that may lack that dimension of its whole shape, or broadcast it."""
    after = shape[::-1].find("H")  # dimensions after the heads
    if not 0 <= after < t.ndim or t.shape[-1 - after] == 1:
        return t
    return t[(..., h, *[slice(None)] * after)]


def per_batch(lengths: Tensor) -> Tensor:
    return lengths[:, None, None, None]  # (B, 1, 1, 1)


def check_type(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], allowed: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor of type {allowed}, got {type(tensor).__name__}; "
            "convert it with torch.as_tensor(...)"
        )
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}; convert it with .to(...)")
    check_strided(name, tensor)


def check_ranks(name: str, tensor: Tensor, ranks: Sequence[int], shape: str, remedy: str) -> None:
    """Raise ValueError for a tensor of another number of dimensions; `shape` says what it must have or broadcast to."""
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} must {shape}, got {tensor.ndim} dimensions, {tuple(tensor.shape)}; {remedy}")


def check_strided(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a tensor without strides, such as a sparse one."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a strided tensor, got layout {tensor.layout}; convert it with .to_dense()")


def check_offsets(name: str, cu: Tensor, total: int, longest: int) -> None:
    """Raise ValueError unless `cu` cuts `total` rows, or some of them, into sequences of at most `longest` rows."""
    steps = cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) > total or bool((steps < 0).any()):
        raise ValueError(
            f"Varlen: {name} must start at 0, never decrease and end at {total} rows or before, got {cu.tolist()}; "
            "write the cumulative sum of the lengths"
        )
    if steps.numel() and int(steps.max()) > longest:
        raise ValueError(
            f"Varlen: max_{name[-1]} must be at least the longest length in {name}, {int(steps.max())}, got {longest}; "
            "pass that, or None to have it read"
        )
