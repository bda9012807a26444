"""What functions of torch and methods of Tensor are in programs: one operation, or a few.

`FUNCTIONS` maps torch's names to functions of Exprs. Their parameters have torch's names and order, and the first
operand is always an Expr.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from .program import CONVERT, Expr

ROOT_HALF, ROOT_TWO_BY_PI = math.sqrt(0.5), math.sqrt(2.0 / math.pi)
WHOLE_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
KINDS = {torch.bool: "b"} | dict.fromkeys(WHOLE_TYPES, "i")


def kind_of_type(dtype: torch.dtype) -> str:
    """Return the kind of numbers of a type."""
    return KINDS.get(dtype, "f")


def _single(name: str) -> Callable[..., Any]:
    return lambda x, *others: x.op(name, *others)


def _scaled(name: str) -> Callable[..., Any]:
    return lambda input, other, alpha=1: input.op(name, other if alpha == 1 else other * alpha)


def _same(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    low = input if min is None else input.op("max", min)
    return low if max is None else low.op("min", max)


def _number(number: Any, like: Any, kind: str | None = None) -> Any:
    return like.build.wrap(like.build.literal(CONVERT[kind or like.kind](number)))


def _relu(input: Any) -> Any:
    return _number(0, input).op("max", input)  # at 0 the gradient is the first operand's, so none, as in torch


def _where(condition: Any, input: Any, other: Any) -> Any:
    return condition.op("where", input, other)


def _divide(input: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return input / other
    down = input // other
    return down if rounding_mode == "floor" else _trunc(input / other).cast(down.kind)


def _trunc(input: Any) -> Any:
    return input if input.kind != "f" else _where(input < 0, input.op("ceil"), input.op("floor"))


def _round_to_whole(name: str) -> Callable[..., Any]:
    return lambda input: input.op(name) if input.kind == "f" else input


def _pow(input: Any, exponent: Any) -> Any:
    """Return a product for a small whole exponent; exp2 for a base of 2."""
    build = input.build
    number, base = build.number(exponent), build.number(input)
    if number is not None and float(number).is_integer() and abs(number) <= 8:
        return _whole_power(input, int(number))
    if number in (0.5, -0.5):
        return input.op("sqrt" if number > 0 else "rsqrt")
    if input.kind != "f" and build.wrap(build.lift(exponent)).kind != "f":
        raise build.refuse(
            "a power of whole numbers must be a number of at most 8; write 2.0 ** x for a floating power"
        )
    return exponent.op("exp2") if base == 2 else input.op("pow", exponent)


def _whole_power(x: Any, n: int) -> Any:
    if n < 0:
        return 1.0 / _whole_power(x, -n)
    product = _number(1, x) if n == 0 else x
    for _ in range(n - 1):
        product = product * x
    return product


def _softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    x = input * beta
    return _where(x > threshold, input, (x.op("exp") + 1.0).op("log") / beta)


def _gelu(input: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        inner = (input + input * input * input * 0.044715) * ROOT_TWO_BY_PI
        return input * 0.5 * (inner.op("tanh") + 1.0)
    return input * 0.5 * ((input * ROOT_HALF).op("erf") + 1.0)


def _elu(input: Any, alpha: Any = 1.0, scale: Any = 1.0) -> Any:
    return _where(input > 0, input, (input.op("exp") - 1.0) * alpha) * scale


def _sign(input: Any) -> Any:
    return _where(input > 0, 1, _where(input < 0, -1, 0)).cast(input.kind)


def _is_nan(input: Any) -> Any:
    return input.op("ne", input)


def _logit(input: Any, eps: Any = None) -> Any:
    x = input if eps is None else _clamp(input, eps, 1.0 - eps)
    return (x / (1.0 - x)).op("log")


def _logical(name: str) -> Callable[..., Any]:
    def of_bools(input: Any, *others: Any) -> Any:
        return input.cast("b").op(name, *[x.cast("b") if isinstance(x, Expr) else bool(x) for x in others])

    return of_bools


def _cast(kind: str) -> Callable[..., Any]:
    return lambda input, *_, **__: input.cast(kind)


def _to(input: Any, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Return input as the kind of a type or of another Expr. Devices are the call's."""
    for x in (dtype, *args):
        if isinstance(x, Expr):
            return input.cast(x.kind)
        if isinstance(x, torch.dtype):
            return input.cast(kind_of_type(x))
    return input


def _like(number: Any) -> Callable[..., Any]:
    return lambda input, *_, dtype=None, **__: _number(number, input, kind_of_type(dtype) if dtype else None)


def _full_like(input: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Any:
    full = input.build.wrap(input.build.lift(fill_value))
    return full.cast(kind_of_type(dtype) if dtype else input.kind)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _single(name) for name in ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos")},
    **{name: _single(name) for name in ("erf", "tanh", "sigmoid", "mul", "eq", "ne", "lt", "le", "gt", "ge", "detach")},
    "negative": _single("neg"), "absolute": _single("abs"), "expit": _single("sigmoid"), "multiply": _single("mul"),
    "less": _single("lt"), "less_equal": _single("le"), "greater": _single("gt"), "greater_equal": _single("ge"),
    "not_equal": _single("ne"), "minimum": _single("min"), "fmin": _single("min"), "maximum": _single("max"),
    "fmax": _single("max"), "remainder": _single("mod"), "mod": _single("mod"),
    "and": _single("and"), "or": _single("or"), "xor": _single("xor"), "lshift": _single("shl"),
    "rshift": _single("shr"), "bitwise_and": _single("and"), "bitwise_or": _single("or"),
    "bitwise_xor": _single("xor"), "bitwise_left_shift": _single("shl"), "bitwise_right_shift": _single("shr"),
    "invert": lambda input: ~input, "bitwise_not": lambda input: ~input,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "add": _scaled("add"), "sub": _scaled("sub"), "subtract": _scaled("sub"),
    "rsub": lambda input, other, alpha=1: other - input * alpha,
    "div": _divide, "divide": _divide, "truediv": _divide, "true_divide": _divide,
    "floordiv": lambda input, other: input // other, "floor_divide": lambda input, other: input // other,
    "floor": _round_to_whole("floor"), "ceil": _round_to_whole("ceil"), "trunc": _trunc, "fix": _trunc,
    "pow": _pow, "power": _pow, "float_power": lambda input, exponent: _pow(input.cast("f"), exponent),
    "square": lambda input: input * input, "reciprocal": lambda input: 1.0 / input,
    "log1p": lambda input: (input + 1.0).op("log"), "expm1": lambda input: input.op("exp") - 1.0,
    "log10": lambda input: input.op("log2") * math.log10(2.0), "tan": lambda input: input.op("sin") / input.op("cos"),
    "logit": _logit,
    "clamp": _clamp, "clip": _clamp, "clamp_min": lambda input, min: input.op("max", min),
    "clamp_max": lambda input, max: input.op("min", max),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: _clamp(input, min_val, max_val),
    "relu": _relu, "relu6": lambda input: _relu(input).op("min", 6.0),
    "leaky_relu": lambda input, negative_slope=0.01: _where(input > 0, input, input * negative_slope),
    "elu": _elu, "silu": lambda input: input * input.op("sigmoid"), "gelu": _gelu, "softplus": _softplus,
    "logsigmoid": lambda input: -_softplus(-input), "log_sigmoid": lambda input: -_softplus(-input),
    "mish": lambda input: input * _softplus(input).op("tanh"),
    "softsign": lambda input: input / (input.op("abs") + 1.0),
    "where": _where, "Tensor.where": lambda input, condition, other: _where(condition, input, other),
    "masked_fill": lambda input, mask, value: _where(mask, value, input).cast(input.kind),
    "sign": _sign, "sgn": _sign, "isnan": _is_nan, "isfinite": lambda input: input - input == 0,
    "isinf": lambda input: input.op("abs") == math.inf,
    "lerp": lambda input, end, weight: input + (end - input) * weight,
    "addcmul": lambda input, tensor1, tensor2, value=1: input + tensor1 * tensor2 * value,
    "addcdiv": lambda input, tensor1, tensor2, value=1: input + tensor1 / tensor2 * value,
    **{name: _cast("f") for name in ("float", "double", "half", "bfloat16")},
    **{name: _cast("i") for name in ("int", "long", "short")}, "bool": _cast("b"),
    "to": _to, "type": _to, "type_as": _to,
    **dict.fromkeys(("clone", "contiguous", "cpu", "cuda", "squeeze", "positive", "pos"), _same),
    **dict.fromkeys(("tensor", "as_tensor", "asarray", "scalar_tensor", "expand_as", "view_as"), _same),
    "zeros_like": _like(0), "ones_like": _like(1), "new_zeros": _like(0), "new_ones": _like(1),
    "full_like": _full_like, "is_floating_point": lambda input: input.kind == "f",
    "dim": lambda input: 0, "size": lambda input: torch.Size(()), "numel": lambda input: 1,
}  # fmt: skip
"""What a function may use, by torch's names."""
