"""What is refused, in words: functions and captures that cannot be traced, and what a function may not do.

An error says which function and which of its lines, what was met, and what to write in its place.
"""

import inspect
import linecache
import sys
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor

from .functions import WHOLE_TYPES

TYPES = (torch.bool, *WHOLE_TYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64)
OWN = ("torch", __name__.partition(".")[0])
"""Packages whose lines an error does not show."""
RETURNS = {"mask": "a bool", "score": "a number"}
PARAMETERS = {"mask": "(b, h, i, j)", "score": "(s, b, h, i, j)"}
LIST_OF_FUNCTIONS = "tilewise.program.FUNCTIONS"

CHOICE = (
    "`if`, `while`, `and`, `or`, `not`, `assert`, `bool()`, `min()`, `max()` and chained comparisons such as "
    "`0 <= x < 4` need one truth value, and this one differs from entry to entry; write "
    "torch.where(condition, a, b), or &, | and ~ with brackets around comparisons"
)
NUMBER = (
    "`range()`, `int()`, `float()`, `.item()`, functions of `math` and indices into a list, a dict or a NumPy array "
    "need one number, and this one differs from entry to entry; write torch's function, "
    "or capture torch.as_tensor(array)"
)
RANDOM = "`{}` draws random numbers; use attention's dropout=, or capture a tensor of random numbers"
CHANGE = (
    "`{}` changes a tensor in place; make a new one: x * 2 instead of x.mul_(2), "
    "torch.where(i == j, 0, x) instead of x[i] = 0"
)
NO_FUNCTION = f"`{{}}` is no pointwise operation that kernels can compute; {LIST_OF_FUNCTIONS} lists those that are"
NO_ARGUMENTS = f"`{{}}` does not take these arguments here; {LIST_OF_FUNCTIONS} has the functions with theirs"
TOO_LONG = "its program has {} characters, more than {}; index a tensor instead of unrolling a loop"

CONTENTS = (
    "`{}` reads the contents of a captured tensor while the function is traced, and calls would not see new ones; "
    "index the tensor and use torch.where, or compute the number outside of the function"
)
TOO_MANY = "{} indices are too many for a captured tensor of {} dimensions; give one for each dimension"
WRONG_INDEX = {
    "f": "an index must be a whole number, got a floating one; convert it with .long()",
    "b": "an index must be a whole number, got a bool; convert it with .long()",
}
BINARY = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"
UNARY = (
    "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "index", "int", "float", "len", "iter",
    "array", "hash", "setitem",
)  # fmt: skip
"""Python's operators, by their names without underscores."""
NAMES_OF_CHANGES = {"__setitem__", "__delitem__", "__set__", "backward"} | {f"__i{name}__" for name in BINARY}
NAMES_OF_NUMBERS = {
    "item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__array__", "__bool__", "__index__", "__int__",
    "__float__",
}  # fmt: skip
NAMES_OF_RANDOM = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "normal",
    "multinomial", "poisson", "binomial", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax",
}  # fmt: skip


def plain(name: str) -> str:
    """Return the name of an operator of Python without its underscores."""
    return name.removeprefix("__").removesuffix("__")


def why_not(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return why a function of torch may not run in a trace, whatever its operands; None if it may."""
    if name in NAMES_OF_RANDOM:
        return RANDOM.format(name)
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in NAMES_OF_CHANGES:
        return CHANGE.format(plain(name))
    for option in ("out", "inplace"):
        if isinstance(kwargs.get(option), (Tensor, bool)) and kwargs[option] is not False:
            return CHANGE.format(f"{name}({option}=...)")
    return None


def not_indexed(ndim: int, left: int) -> str:
    """Return the words for a tensor of `ndim` dimensions, of which `left` have no index."""
    example = ", ".join("bhij"[:ndim] if ndim <= 4 else "abcdefgh"[:ndim])
    return (
        f"a captured tensor is used as a number with {left} of its {ndim} dimensions not indexed; "
        f"index every dimension: x[{example}]"
    )


def not_an_index(x: Any, ndim: int) -> str:
    """Return the words for a slice, None or ... as an index into a tensor of `ndim` dimensions."""
    got = {slice: "a slice", type(None): "None"}.get(type(x), "...")
    return f"an index must be a whole number, got {got}; index all of the tensor's {ndim} dimensions by numbers"


def _of_user(fn: Any) -> Any:
    """Return the Python function behind a bound method, a partial function or an object that can be called."""
    while not hasattr(fn, "__code__"):
        inner = getattr(fn, "func", None) or getattr(fn, "__func__", None) or type(fn).__dict__.get("__call__")
        if not callable(inner) or inner is fn or type(inner).__name__ in ("method-wrapper", "wrapper_descriptor"):
            return None
        fn = inner
    return fn


def _line_of(frame: FrameType | None, until: Any) -> tuple[str, int] | None:
    """Return file and line of the innermost frame that is the user's, of those inside the frame of `until`."""
    while frame is not None and frame.f_code is not until:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in OWN:
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def place(what: str, fn: Any, until: Any = None, quotes: bool = True) -> str:
    """Return "mask near (model.py:31: its text)": the line that now runs, else where the function begins.

    until: the code of the function that called fn, None if fn does not run. quotes: whether to quote the line.
    """
    inner = _of_user(fn)
    name = getattr(fn, "__name__", None) or getattr(inner, "__name__", type(fn).__name__)
    found = _line_of(sys._getframe(1), until) if until else None
    if found is None:
        if inner is None:
            return f"{what} {name}"
        file, line = inner.__code__.co_filename, inner.__code__.co_firstlineno
        while linecache.getline(file, line).lstrip().startswith("@"):
            line += 1
        found = file, line
    text = linecache.getline(*found).strip() if quotes else ""
    return f"{what} {name} ({found[0]}:{found[1]}{': ' + text if text else ''})"


def check_function(what: str, fn: Any, captured: int) -> None:
    """Raise a TypeError if fn is no function of the indices and of `captured` values."""
    names = PARAMETERS[what]
    if isinstance(fn, type):
        raise TypeError(f"{what} must be a function of {names}, got the class {fn.__name__}; write {fn.__name__}(...)")
    if not callable(fn):
        raise TypeError(f"{what} must be a function of {names}, got {fn!r}; write one, or a {what.capitalize()}")
    count = names.count(",") + 1 + captured
    code = fn.__code__ if type(fn) is FunctionType else None
    if code and code.co_argcount == count and not code.co_kwonlyargcount:
        return
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin function: the call will tell
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        more = f" and one parameter for each of {captured} captured values" if captured else ""
        raise TypeError(
            f"{place(what, fn)}: it must take {names}{more}, got {signature}; change it, or close over other values"
        ) from None


def check_tensor(t: Tensor) -> str | None:
    """Return why a tensor cannot be captured, None if it can."""
    placements: Any = getattr(t, "placements", ())  # of a DTensor
    if not all([at.is_replicate() for at in placements]):
        return f"a captured tensor must be whole on every rank, got a DTensor of {placements}; capture .full_tensor()"
    if t.is_meta:
        return "a captured tensor must hold numbers, got one on the meta device; create it on the device of q"
    if t.is_quantized:
        return f"a captured tensor must not be quantized, got {t.dtype}; convert it with .dequantize()"
    if t.dtype not in TYPES:
        return f"a captured tensor must be bool, a signed or 8-bit integer, or fp16 to fp64, got {t.dtype}; convert it"
    if t.layout is not torch.strided:
        return f"a captured tensor must be strided, got layout {t.layout}; convert it with .to_dense()"
    return None


def not_a_number(x: Any) -> str:
    """Return the words for an operand that is neither a number nor a tensor."""
    shown = repr(x) if len(repr(x)) < 40 else "..."
    return f"{type(x).__name__} {shown} is no number; capture arrays and lists as tensors, torch.as_tensor(x)"


def no_result(what: str, found: Any) -> str:
    """Return the words for what a function returns, if it is neither a number nor a tensor."""
    got, remedy = f"a {type(found).__name__}", "return one value"
    if found is None:
        got, remedy = "None", "write `return` before the result"
    return f"it must return {RETURNS[what]}, got {got}; {remedy}"


def wrong_kind(what: str) -> str:
    """Return the words for a mask that returns a number, or a score that returns a bool."""
    remedy = {"mask": "got a number; write x != 0", "score": "got a bool; write torch.where(seen, s, -float('inf'))"}
    return f"it must return {RETURNS[what]}, {remedy[what]}"
