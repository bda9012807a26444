"""Function: masks and scores that are plain Python functions, traced to a program (tilewise/program)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ..program import Aligned, Entries, Program, decode, trace
from ..program.functions import kind_of_type
from ..program.place import indices, moved
from ..program.refusals import check_tensor, place
from .value import Value

ALIGNS = "first", "last"
DECORATE: Any = object()
"""It stands for the function where `of` is a decorator with arguments."""
V = TypeVar("V", bound="Function")


@dataclass(frozen=True, eq=False, repr=False)
class Function(Value):
    """MaskOf and ScoreOf derive from this class: a program, its numbers, and the tensors that it captures.

    Its recipe's name is all but numbers and tensors. `of_name` makes of it an instance with None in place of tensors,
    which stands where a class stands for our own values.
    """

    text: str
    """The program's."""
    align: str
    """What i counts from: "first" or "last" (see program.Aligned)."""
    given: tuple[Any, ...]
    """The captured tensors."""
    numbers: tuple[Any, ...] = ()
    place: str = "a function"
    """What errors call it: its name, file and line."""
    what: ClassVar[str]
    """What it is, "mask" or "score"."""
    needs = frozenset({"functions"})

    @classmethod
    def of(cls: type[V], fn: Callable[..., Any], captured: Sequence[Any], align: str) -> V:
        """Trace a function; raise a TypeError or ValueError for what no program can be."""
        if align not in ALIGNS:
            raise ValueError(
                f'{cls.what.capitalize()}.of: align must be "first" or "last", got {align!r}; leave it out for rows '
                "that count from 0"
            )
        return cls.from_program(program_of(fn, cls.what, captured, align), place(cls.what, fn, quotes=False))

    @classmethod
    def from_program(cls: type[V], found: Aligned, where: str) -> V:
        """Return the value of a program with its tensors and numbers. Errors call it `where`."""
        value = cls(found.program.text, found.align, found.tensors, found.numbers, where)
        object.__setattr__(of_name(value.name), "place", where)  # a Problem has no other name for it
        return value

    @property
    def program(self) -> Program:
        """Return the program."""
        return decode(self.text)

    @property
    def traced(self) -> Aligned:
        """Return the program with its tensors and numbers."""
        return Aligned(self.program, self.given, self.numbers, self.align)

    @property
    def name(self) -> str:
        """Return the name in recipes."""
        return f"{type(self).__name__} {self.align} {len(self.given)} {self.text}"

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.name, str(self.numbers), tuple(map(id, self.given))

    def __repr__(self) -> str:
        return f"<{self.place}>"

    def public_name(self) -> str:  # type: ignore[override]  # of a class, for our own values
        return self.place

    @property
    def captures(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return a name for each captured tensor."""
        return tuple([f"captured tensor {n}" for n in range(1, len(self.given) + 1)])

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self.given

    @property
    def plain(self) -> tuple[Any, ...]:
        finite = [x if not isinstance(x, float) or math.isfinite(x) else str(x) for x in self.numbers]
        return (self.name, *finite)

    def rebuild(self: V, numbers: tuple[Any, ...], tensors: Sequence[Any]) -> V:  # type: ignore[override]
        """Return the value with other numbers, as in `plain`, and other tensors or their specs."""
        plain = tuple([float(x) if isinstance(x, str) else x for x in numbers])
        return type(self)(self.text, self.align, tuple(tensors), plain, self.place)

    def with_(self: V, *tensors: Tensor) -> V:
        """Return the value with other captured tensors in place of its own, in order, without another trace.

        They must have as many dimensions, and be floating, whole or bool as those are; TypeError or ValueError else.
        """
        if len(tensors) != len(self.given):
            raise ValueError(
                f"{self.place}: with_ must get a tensor for each of {len(self.given)} captured ones, got "
                f"{len(tensors)}; pass them in the order of captures"
            )
        for name, t, old in zip(self.captures, tensors, self.given, strict=True):
            if not isinstance(t, Tensor) or check_tensor(t):
                got = check_tensor(t) if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"{self.place}: {name} must be a tensor that `of` takes, got {got}; pass another")
            if t.ndim != old.ndim or kind_of_type(t.dtype) != kind_of_type(old.dtype):
                raise ValueError(
                    f"{self.place}: {name} must be of {old.ndim} dimensions and a type like {old.dtype}, got {t.ndim} "
                    f"and {t.dtype}; make another value with `of`"
                )
        return replace(self, given=tensors)

    def at(self, b: int, count: int = 1) -> Any:
        return self  # the program reads b itself

    def of_heads(self, h: slice) -> Any:
        return self

    def placed(self, place: Any, M: int, N: int) -> Any:
        return self.moved("first", i=place.row, j=place.column, b=place.batch, h=place.head)

    def of_part(self, place: Any) -> Any:
        return self.moved(self.align, b=place.batch, h=place.head)

    def moved(self: V, align: str, **by: int) -> V:
        """Return the function with numbers added to what it reads: the same, at a place of the whole."""
        text, read = _moved(
            self.text, len(self.numbers), tuple(by), (type(self).__name__, align, len(self.given)), self.place
        )
        numbers = (*self.numbers, *[by[name] for name in read])
        return type(self)(text, align, self.given, numbers, self.place) if read else self

    def rows(self, at: Entries) -> Entries:
        """Return entries with i as the function counts it."""
        return at if self.align == "first" else at._replace(i=at.aligned)

    @property
    def shapes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return "B" and "H" for the dimensions of captured tensors that b and h index, "?" for others."""
        return tuple(["".join([c for c, _ in sizes]) for sizes in indices(self.text, len(self.given))])

    def whole_shapes(self, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # type: ignore[override]
        """Return the least size of each dimension, None for any. At a place, it is that of what the call reads."""
        return [
            tuple([None if c == "?" else getattr(problem, c) + sum([numbers[n] for n in at]) for c, at in sizes])
            for sizes in indices(self.text, len(self.given))
        ]

    def fits(self, shape: tuple[int, ...], whole: tuple[Any, ...]) -> bool:  # type: ignore[override]
        return all([least is None or size >= least for size, least in zip(shape, whole, strict=False)])

    def allowed(self, n: int, whole: tuple[Any, ...]) -> str:  # type: ignore[override]
        least = [
            f"{size} in dimension {dim}, which {c.lower()} indexes"
            for dim, (c, size) in enumerate(zip(self.shapes[n], whole, strict=True))
            if size is not None
        ]
        return f"have a size of at least {' and '.join(least)}"

    def batched_ranks(self) -> list[int | None]:  # type: ignore[override]
        return [None] * len(self.given)

    @property
    def reads_batch(self) -> bool:  # type: ignore[override]
        return "b" in self._reads

    @property
    def _reads(self) -> frozenset[str]:
        return self.program.reads[self.program.outputs[0]]

    def against_cache(self) -> str:  # type: ignore[override]
        from_first = "shift" in self._reads or (self.align == "first" and "i" in self._reads)
        return 'its rows count from the first (align="first"), which a cache does not know' * from_first


def program_of(fn: Callable[..., Any], what: str, captured: Sequence[Any], align: str) -> Aligned:
    """Trace a function that counts rows as `align` says."""
    return Aligned(*trace(fn, what, captured), align)


class Kinds(dict[str, Any]):
    """Every class of mask or score by its name; for the name of a function, an instance without tensors."""

    def __missing__(self, name: str) -> Any:
        if " " not in name:
            raise KeyError(name)
        return of_name(name)


MADE: dict[str, type[Function]] = {}
"""MaskOf and ScoreOf, by their names."""


@lru_cache(4096)
def of_name(name: str) -> Any:
    """Return the function of a recipe's name, with None in place of tensors."""
    kind, align, count, text = name.split(" ", 3)
    return MADE[kind](text, align, (None,) * int(count))


def _moved(
    text: str, count: int, names: tuple[str, ...], name: tuple[Any, ...], where: str
) -> tuple[str, tuple[str, ...]]:
    """Return what program.place.moved does. Errors call the function of the new name `where`."""
    text, read = moved(text, count, names)
    kind, align, tensors = name
    object.__setattr__(of_name(f"{kind} {align} {tensors} {text}"), "place", where)
    return text, read


_moved._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: programs are moved while a call is traced."""


def as_value(given: Any, base: type, of: Callable[[Any], Any]) -> Any:
    """Return a mask or score, or `of` a plain function; None for anything else."""
    if isinstance(given, base):
        return given
    return of(given) if callable(given) and not isinstance(given, type) else None
