"""Function: masks and scores that are plain Python functions, traced to a program (tilewise/program)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..program import Aligned, Entries, Program, decode, trace
from ..program.functions import kind_of_type
from ..program.place import indices, moved
from ..program.refusals import check_tensor, place
from .value import Value

ALIGNS = "first", "last"
DECORATE: Any = object()
"""It stands for the function where `of` is a decorator with arguments."""
V = TypeVar("V", bound="Function")


class Ruled(Value):
    """Masks and scores derive from this class: a program says what they compute, traced from their rule."""

    what: ClassVar[str]
    """What it is, "mask" or "score"."""
    rule: ClassVar[Callable[..., Any]]
    """The value as a function of b, h, i, j and its fields, of a score also of s, in front."""
    align: Any
    """What the rule's i counts from, "first" or "last" (see program.Aligned)."""

    @classmethod
    def of(cls, fn: Callable[..., Any] = DECORATE, *captured: Any, align: str = "first") -> Any:
        """Make a mask of a function fn(b, h, i, j, *captured) that returns a bool, whether query i sees key j; or a
        score of a function fn(s, b, h, i, j, *captured) that returns the new logit.

        The function is traced at once, by one call with symbolic numbers. It may use Python's operators, the functions
        of torch in tilewise.program.FUNCTIONS, and captured tensors, of which it indexes every dimension. Python's
        `if`, `and`, `or` and `not` are refused: write torch.where, &, | and ~. Also a decorator: `@tw.Mask.of`, or
        `@tw.Mask.of(align="last")`. A plain function as `mask=` or `score=` is traced in each call.

        Args:
            fn: a function of the logit s, for a score, after the scale and earlier scores, in fp32 (of fp64 inputs in
                fp64); the batch entry b (with a layout, the sequence), the query head h, the row i, and the key j.
            captured: tensors, bool, whole or floating, of any shape on q's device, and numbers, for fn's parameters
                after j. Tensors that fn closes over are captured, too; numbers that it closes over are constants.
            align: "first": i counts rows from 0. "last": the last row's i is the last key's j, as in Causal.

        Returns:
            A Mask or a Score. Its `with_(*tensors)` is the same with other captured tensors. New contents of captured
            tensors count. Floating ones of a score that require a gradient get one, summed in fp32 (fp64).

        Raises:
            TypeError, ValueError: fn is no such function; the message names it, its line, and the remedy.
        """
        kind = MADE[f"{cls.what.capitalize()}Of"]
        return (lambda made: kind.trace(made, captured, align)) if fn is DECORATE else kind.trace(fn, captured, align)

    @property
    def rule_takes(self) -> tuple[Any, ...]:
        """Return what the rule takes after j."""
        return self._fields

    @property
    def traced(self) -> Aligned:
        """Return the program, with the tensors and numbers that it reads."""
        takes = self.rule_takes
        program = program_of_rule(type(self), tuple([self.sketch(x) for x in takes]))
        numbers = tuple([x for x in takes if not hasattr(x, "dtype")])
        return Aligned(program, self.tensors, numbers, self.align)

    @classmethod
    def sketch(cls, x: Any) -> Any:
        """Return what a program may depend on of a field: a number's type, or a tensor's type and sizes, up to 2.

        A spec stands for its tensor.
        """
        return (x.dtype, tuple([min(size, 2) for size in x.shape])) if hasattr(x, "dtype") else type(x)

    def rows(self, at: Entries) -> Entries:
        """Return entries with i as the rule counts it."""
        return at if self.align == "first" else at.from_last()


def read(t: Any, *index: Any) -> Any:
    """Return what rules read of a tensor that broadcasts to these indices."""
    own = zip(index[len(index) - t.ndim :], t.shape, strict=True)
    return t[tuple([x if size != 1 else 0 for x, size in own])] if t.ndim else t


@lru_cache(1024)
def program_of_rule(kind: Any, takes: tuple[Any, ...]) -> Program:
    """Return the program of a class's rule, for fields of which `sketch` says this."""
    given = [x() if isinstance(x, type) else torch.zeros(x[1], dtype=x[0], device="cpu") for x in takes]
    return trace(kind.rule, kind.what, given).program


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

    @classmethod
    def trace(cls: type[V], fn: Callable[..., Any], captured: Sequence[Any], align: str) -> V:
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
        return cls(found.program.text, found.align, found.tensors, found.numbers, where)

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
        """Return the name in recipes; outside of graphs, it knows what errors call the function."""
        name = f"{type(self).__name__} {self.align} {len(self.given)} {self.text}"
        return name if is_compiling() else Name(name, self.place)

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

    def placed(self, place: Any, M: int, N: int) -> Any:
        return self.moved("first", i=place.row, j=place.column, b=place.batch, h=place.head)

    def of_part(self, place: Any) -> Any:
        return self.moved(self.align, b=place.batch, h=place.head)

    def moved(self: V, align: str, **by: int) -> V:
        """Return the function with numbers added to what it reads: the same, at a place of the whole."""
        text, read = _moved(self.text, len(self.numbers), tuple(by))
        numbers = (*self.numbers, *[by[name] for name in read])
        return type(self)(text, align, self.given, numbers, self.place) if read else self

    @property
    def shapes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return "B" and "H" for the dimensions of captured tensors that b or h indexes, "?" for others."""
        dims = [["".join([*dim]) for dim in each] for each in indices(self.text, len(self.given))]
        return tuple(["".join([c if c in ("B", "H") else "?" for c in each]) for each in dims])

    def whole_shapes(self, problem: Any, numbers: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # type: ignore[override]
        """Return the least size of each dimension, None for any. At a place, it is that of what the call reads.

        Those that j indexes are compared with a cache's capacity: its sequences may become as long.
        """
        sizes = {c: getattr(problem, c) for c in "BH"}
        if "cache" in problem.layout.needs:
            sizes["N"] = problem.N
        found = indices(self.text, len(self.given))
        least = [
            [[sizes[c] + sum([numbers[n] for n in at]) for c, at in dim.items() if c in sizes] for dim in each]
            for each in found
        ]
        return [tuple([max(dim, default=None) for dim in each]) for each in least]  # type: ignore[type-var]

    def of_heads(self, h: slice) -> Any:
        return self  # the program reads h itself

    def fits(self, shape: tuple[int, ...], whole: tuple[Any, ...]) -> bool:  # type: ignore[override]
        return all([least is None or size >= least for size, least in zip(shape, whole, strict=False)])

    def sizes(self, letter: str) -> list[int]:
        found = zip(self.given, indices(self.text, len(self.given)), strict=True)
        dims = [(n, at[letter]) for t, each in found for n, at in zip(t.shape, each, strict=False) if letter in at]
        return [n - sum([self.numbers[x] for x in before]) for n, before in dims]

    def allowed(self, n: int, whole: tuple[Any, ...]) -> str:  # type: ignore[override]
        letters = indices(self.text, len(self.given))[n]
        least = [
            f"{size} in dimension {dim}, which {' and '.join({'B': 'b', 'H': 'h', 'N': 'j'}[c] for c in sorted(own))} "
            f"index{'es' * (len(own) == 1)}"
            for dim, (own, size) in enumerate(zip(letters, whole, strict=True))
            if size is not None
        ]
        return f"have a size of at least {' and '.join(least)}"

    def batched_ranks(self) -> list[int | None]:  # type: ignore[override]
        return [None] * len(self.given)

    @property
    def reads_batch(self) -> bool:  # type: ignore[override]
        return "b" in self._reads

    def varies_with(self, given: Sequence[tuple[int, ...]]) -> set[str]:  # type: ignore[override]
        return {name.upper() for name in self._reads & {"b", "h"}}

    @property
    def _reads(self) -> frozenset[str]:
        return self.program.reads[self.program.outputs[0]]

    def against_cache(self) -> str:  # type: ignore[override]
        from_first = "shift" in self._reads or (self.align == "first" and "i" in self._reads)
        return 'its rows count from the first (align="first"), which a cache does not know' * from_first


def program_of(fn: Callable[..., Any], what: str, captured: Sequence[Any], align: str) -> Aligned:
    """Trace a function that counts rows as `align` says."""
    return Aligned(*trace(fn, what, captured), align)


class Name(str):
    """The name of a function in recipes, with what errors call it. Functions of one text have equal names."""

    place: str

    def __new__(cls, name: str, place: str = "a function") -> "Name":
        found = super().__new__(cls, name)
        found.place = place
        return found

    def __getnewargs__(self) -> tuple[str, str]:
        return str(self), self.place


class Kinds(dict[str, Any]):
    """Every class of mask or score by its name; for the name of a function, an instance without tensors."""

    def __missing__(self, name: str) -> Any:
        if " " not in name:
            raise KeyError(name)
        found = of_name(name)
        return type(found)(found.text, found.align, found.given, (), name.place) if isinstance(name, Name) else found


MADE: dict[str, type[Function]] = {}
"""MaskOf and ScoreOf, by their names."""


@lru_cache(4096)
def of_name(name: str) -> Any:
    """Return the function of a recipe's name, with None in place of tensors."""
    kind, align, count, text = name.split(" ", 3)
    return MADE[kind](text, align, (None,) * int(count))


def _moved(text: str, count: int, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    return moved(text, count, names)


_moved._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: programs are moved while a call is traced."""


def as_value(given: Any, base: type, of: Callable[[Any], Any]) -> Any:
    """Return a mask or score, or `of` a plain function; None for anything else."""
    if isinstance(given, base):
        return given
    return of(given) if callable(given) and not isinstance(given, type) else None
