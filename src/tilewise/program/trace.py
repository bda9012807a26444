"""From a Python function to a program: one call of the function, with a Sym for each index.

A Sym answers Python's operators, methods of tensors and functions of torch by adding nodes. What a Sym does not see,
`Watch` does: reads of captured tensors, changes in place, random numbers and constants. A function is traced anew each
time, since one code object may serve many closures.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import refusals
from .functions import FUNCTIONS, kind_of_type
from .program import Builder, Expr, Program

LONGEST_TEXT = 65536
TYPE_OF_KIND = {"f": torch.float32, "i": torch.int32, "b": torch.bool}


class Traced(NamedTuple):
    """A function's program, the tensors that it reads, in order, and the numbers given to it."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]


def trace(fn: Callable[..., Any], what: str, captured: Sequence[Any] = ()) -> Traced:
    """Trace a function: a "mask" of (b, h, i, j, *captured), or a "score" of (s, b, h, i, j, *captured).

    captured: tensors, and numbers, which become inputs of the program. Tensors that fn closes over follow in the order
    in which it reads them. Numbers that it closes over are constants, of which NumPy's are as good as Python's.
    Raises TypeError if fn, a captured value or what fn returns has a wrong type, and ValueError for what no program can
    do; then nothing has run or changed. An exception of fn passes through.
    """
    refusals.check_function(what, fn, len(captured))
    return Trace(fn, what).run(captured)


class Trace(Builder):
    """A program in the making, and what it captures."""

    def __init__(self, fn: Callable[..., Any], what: str) -> None:
        super().__init__()
        self.fn, self.what = fn, what
        self.tensors: list[Tensor] = []
        self.constants: dict[int, Tensor] = {}
        """Tensors that the function makes from numbers alone, by their ids."""

    def run(self, captured: Sequence[Any]) -> Traced:
        """Call the function, and return what it is."""
        args = [self.wrap(self.add(("in", name))) for name in ("sbhij" if self.what == "score" else "bhij")]
        numbers: list[Any] = []
        args += [self.given(x, numbers) for x in captured]
        with Watch(self):
            found = self.fn(*args)
        program = self.done([self.result(found)])
        if len(program.text) > LONGEST_TEXT:
            raise self.refuse(refusals.TOO_LONG.format(len(program.text), LONGEST_TEXT))
        return Traced(program, tuple(self.tensors), tuple(numbers))

    def given(self, x: Any, numbers: list[Any]) -> Any:
        """Return the argument for a captured value; a number becomes an input."""
        if isinstance(x, Tensor):
            t = self.tensor(x)
            return x if x.ndim else self.wrap(self.add(("load", t, kind_of_type(x.dtype))))
        number = python_number(x)
        if number is None:
            got = f"a captured value must be a tensor or a number, got {type(x).__name__} {x!r}"
            raise self.refuse(f"{got}; convert it with torch.as_tensor(...), or close over it", TypeError)
        kind = "b" if isinstance(number, bool) else "i" if isinstance(number, int) else "f"
        numbers.append(number)
        return self.wrap(self.add(("in", f"{kind}{len(numbers) - 1}")))

    def result(self, found: Any) -> int:
        """Return the node of what the function returned."""
        if not isinstance(found, (Sym, Part, Tensor)) and python_number(found) is None:
            raise self.refuse(refusals.no_result(self.what, found), TypeError)
        if isinstance(found, (Part, Tensor)) and found.ndim:
            raise self.refuse(
                f"it must return {refusals.RETURNS[self.what]}, got a tensor: {not_indexed(found)}", TypeError
            )
        n = self.lift(found)
        if (self.kinds[n] == "b") != (self.what == "mask"):
            raise self.refuse(refusals.wrong_kind(self.what), TypeError)
        return n if self.what == "mask" else self.cast("f", n)

    def wrap(self, n: int) -> "Sym":
        return Sym(self, n)

    def refuse(self, what: str, error: type[Exception] = ValueError) -> Exception:
        """Return an error that names the function and the line that now runs."""
        return error(f"{refusals.place(self.what, self.fn, Trace.run.__code__)}: {what}")

    def tensor(self, t: Tensor) -> int:
        """Return the place of a captured tensor."""
        for n, other in enumerate(self.tensors):
            if other is t:
                return n
        why = refusals.check_tensor(t)
        if why:
            raise self.refuse(why, TypeError)
        self.tensors.append(t)
        return len(self.tensors) - 1

    def lift(self, x: Any) -> int:
        """Return the node of a number, a Sym, or a tensor without dimensions."""
        if isinstance(x, Sym):
            return x.n
        if isinstance(x, (Tensor, Part)):
            if isinstance(x, Part) or x.ndim:
                raise self.refuse(not_indexed(x))
            if id(x) in self.constants:
                return self.literal(x.item())
            return self.add(("load", self.tensor(x), kind_of_type(x.dtype)))
        number = python_number(x)
        if number is None:
            raise self.refuse(refusals.not_a_number(x))
        return self.literal(number)

    def load(self, source: Any, index: Any) -> Any:
        """Return source[index]: a Sym, or a Part while dimensions are left."""
        part = source if isinstance(source, Part) else Part(self, self.tensor(source), source.dtype, source.ndim)
        nodes = []
        for x in index if isinstance(index, tuple) else (index,):
            if x is None or x is Ellipsis or isinstance(x, slice):
                raise self.refuse(refusals.not_an_index(x, part.whole))
            n = self.lift(x)
            if self.kinds[n] != "i":
                raise self.refuse(refusals.WRONG_INDEX[self.kinds[n]])
            nodes.append(n)
        if len(nodes) > part.ndim:
            raise self.refuse(refusals.TOO_MANY.format(part.whole - part.ndim + len(nodes), part.whole))
        found = part.at(nodes)
        return found if found.ndim else self.wrap(self.add(("load", part.t, kind_of_type(part.dtype), *found.index)))

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a function of torch or a method of Tensor is on Syms."""
        why = refusals.why_not(name, kwargs)
        if why:
            raise self.refuse(why)
        if name == "__getitem__":
            return self.load(args[0], args[1])
        if name in refusals.NAMES_OF_NUMBERS:
            raise self.refuse(refusals.NUMBER)
        function = FUNCTIONS.get(name) or FUNCTIONS.get(name.strip("_").removeprefix("special_"))
        if function is None:
            raise self.refuse(refusals.NO_FUNCTION.format(refusals.plain(name)))
        some = [self.operand(x) for x in args]
        if some and not isinstance(some[0], Sym):
            some[0] = self.wrap(self.lift(some[0]))
        named = {key: self.operand(x) for key, x in kwargs.items() if key not in ("out", "inplace")}
        try:
            return function(*some, **named)
        except TypeError:
            raise self.refuse(refusals.NO_ARGUMENTS.format(name)) from None

    def operand(self, x: Any) -> Any:
        """Return an argument of a function: a tensor becomes a Sym."""
        return self.wrap(self.lift(x)) if isinstance(x, (Tensor, Part)) else x


def python_number(x: Any) -> Any:
    """Return a number of Python for one of Python or NumPy, None for anything else."""
    if isinstance(x, bool):
        return x
    if isinstance(x, int):
        return int(x)
    if isinstance(x, float):
        return float(x)
    if hasattr(x, "item") and getattr(x, "shape", None) == () and not isinstance(x, Tensor):
        number = x.item()
        return number if isinstance(number, (bool, int, float)) else None
    return None


class Part:
    """A captured tensor of which some leading dimensions have been indexed."""

    def __init__(self, trace: Trace, t: int, dtype: torch.dtype, whole: int, index: tuple[int, ...] = ()) -> None:
        self.trace, self.t, self.dtype, self.whole, self.index = trace, t, dtype, whole, index
        self.ndim = whole - len(index)

    def at(self, nodes: Sequence[int]) -> "Part":
        """Return the part at further indices."""
        return Part(self.trace, self.t, self.dtype, self.whole, (*self.index, *nodes))

    def __getitem__(self, index: Any) -> Any:
        return self.trace.load(self, index)

    def _refuse(self, *_: Any) -> Any:
        raise self.trace.refuse(not_indexed(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(x for x in flat((args, kwargs)) if isinstance(x, Part))._refuse()


def not_indexed(x: Tensor | Part) -> str:
    """Return why a tensor or a part of one is no number."""
    return refusals.not_indexed(x.whole if isinstance(x, Part) else x.ndim, x.ndim)


class Sym(Expr):
    """A number that differs from entry to entry, as the function sees it: like a tensor without dimensions."""

    __slots__ = ()
    shape, ndim, requires_grad, is_cuda, device = torch.Size(()), 0, False, False, torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that the number has in kernels."""
        return TYPE_OF_KIND[self.kind]

    @property
    def trace(self) -> Trace:
        """Return the trace that the number belongs to."""
        return self.build  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        some = next(x for x in flat((args, kwargs)) if isinstance(x, (Sym, Part)))
        return some.trace.call(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if not callable(getattr(Tensor, name)):
            raise self.trace.refuse(refusals.NO_FUNCTION.format(name))
        of_torch = "Tensor.where" if name == "where" else name
        return lambda *args, **kwargs: self.trace.call(of_torch, (self, *args), kwargs)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.trace.call(function.__name__, args, kwargs)

    def __pow__(self, other: Any) -> Any:
        return self.trace.call("pow", (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return self.trace.call("pow", (other, self), {})

    def __getitem__(self, index: Any) -> Any:
        raise self.trace.refuse("an index is too many for a number; index captured tensors alone")

    def __setitem__(self, index: Any, value: Any) -> Any:
        self.trace.call("__setitem__", (self, index, value), {})

    def _choice(self, *_: Any) -> Any:
        raise self.trace.refuse(refusals.CHOICE)

    def _number(self, *_: Any, **__: Any) -> Any:
        raise self.trace.refuse(refusals.NUMBER)

    def _no_function(self, *_: Any) -> Any:
        raise self.trace.refuse(refusals.NO_FUNCTION.format("@"))

    __bool__ = _choice
    __index__ = __int__ = __float__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _number
    __len__ = __iter__ = __array__ = __hash__ = _number
    __matmul__ = __rmatmul__ = _no_function


for _name in refusals.BINARY:
    setattr(Part, f"__{_name}__", Part._refuse)
    setattr(Part, f"__r{_name}__", Part._refuse)
for _name in refusals.UNARY:
    setattr(Part, f"__{_name}__", Part._refuse)


def flat(x: Any) -> Iterator[Any]:
    """Yield what nested tuples, lists and dicts hold."""
    if isinstance(x, (tuple, list)):
        for y in x:
            yield from flat(y)
    elif isinstance(x, dict):
        yield from flat(tuple(x.values()))
    else:
        yield x


class Watch(TorchFunctionMode):
    """Sees every function of torch in a trace; those without a Sym run, unless they change something or are random."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, trace = getattr(func, "__name__", ""), kwargs or {}, self.trace
        captured = bool(args) and isinstance(args[0], Tensor) and id(args[0]) not in trace.constants
        if name == "__getitem__" and captured and _is_whole(args[1], args[0].ndim):
            return trace.load(args[0], args[1])
        if Sym in types or Part in types or any([isinstance(x, Sym) for x in flat(args)]):
            return trace.call(name, args, kwargs)
        why = refusals.CONTENTS.format(refusals.plain(name)) if captured and name in refusals.NAMES_OF_NUMBERS else None
        why = why or refusals.why_not(name, kwargs)
        if why:
            raise trace.refuse(why)
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and not found.requires_grad:
            tensors = [x for x in flat((args, kwargs)) if isinstance(x, Tensor)]
            if all([id(x) in trace.constants for x in tensors]):
                trace.constants[id(found)] = found
        return found


def _is_whole(index: Any, ndim: int) -> bool:
    """Tell whether an index is one number for each of the dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    return len(index) == ndim and all([type(x) is int for x in index])
