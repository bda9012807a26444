"""The operations of programs: one table, a row per operation.

A new operation is one row here, and one line of the property test in tests/program/test_ops.py.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Op(NamedTuple):
    """One pointwise operation.

    takes: the kind that operands are converted to: "f" floating, "i" whole, "b" bool. "ib" and "any" take the widest
        kind among them, "ib" no floating ones. The first operand of `where` is a bool, and no part of this.
    gives: the kind of the result; "=" is that of the operands.
    derivative: from the result y and the operands, dy/dx for each operand x: a factor, a bool that selects (the
        gradient where it is true, 0 elsewhere), or None for 0. The operation has none if this is None.
    """

    torch: Callable[..., Any]
    triton: str
    takes: str
    gives: str
    derivative: Callable[..., tuple[Any, ...]] | None = None


def _sign(x: Any) -> Any:
    return (x > 0.0) * 1.0 - (x < 0.0) * 1.0


def _power(y: Any, x: Any, n: Any) -> tuple[Any, Any]:
    """x^0 is constant in x, and 0^n in n, even where a factor of the usual rule is infinite."""
    by_x = (n == 0.0).op("where", 0.0, n * x.op("pow", n - 1.0))
    by_n = (y == 0.0).op("where", 0.0, y * x.op("log"))
    return by_x, by_n


def _floor_divide(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="floor")


LN2, TWO_BY_ROOT_PI = math.log(2.0), 2.0 / math.sqrt(math.pi)

# At a tie, min and max pass the gradient to their first operand.
OPS = {
    "add": Op(operator.add, "({} + {})", "any", "=", lambda y, a, b: (1.0, 1.0)),
    "sub": Op(operator.sub, "({} - {})", "any", "=", lambda y, a, b: (1.0, -1.0)),
    "mul": Op(operator.mul, "({} * {})", "any", "=", lambda y, a, b: (b, a)),
    "div": Op(operator.truediv, "({} / {})", "f", "f", lambda y, a, b: (1.0 / b, -y / b)),
    "neg": Op(operator.neg, "(-{})", "any", "=", lambda y, x: (-1.0,)),
    "abs": Op(torch.abs, "tl.abs({})", "any", "=", lambda y, x: (_sign(x),)),
    "min": Op(torch.minimum, "tl.minimum({}, {})", "any", "=", lambda y, a, b: (a <= b, a > b)),
    "max": Op(torch.maximum, "tl.maximum({}, {})", "any", "=", lambda y, a, b: (a >= b, a < b)),
    "exp": Op(torch.exp, "tl.exp({})", "f", "f", lambda y, x: (y,)),
    "exp2": Op(torch.exp2, "tl.exp2({})", "f", "f", lambda y, x: (y * LN2,)),
    "log": Op(torch.log, "tl.log({})", "f", "f", lambda y, x: (1.0 / x,)),
    "log2": Op(torch.log2, "tl.log2({})", "f", "f", lambda y, x: (1.0 / (x * LN2),)),
    "sqrt": Op(torch.sqrt, "tl.sqrt({})", "f", "f", lambda y, x: (0.5 / y,)),
    "rsqrt": Op(torch.rsqrt, "tl.rsqrt({})", "f", "f", lambda y, x: (-0.5 * y * y * y,)),
    "sin": Op(torch.sin, "tl.sin({})", "f", "f", lambda y, x: (x.op("cos"),)),
    "cos": Op(torch.cos, "tl.cos({})", "f", "f", lambda y, x: (-x.op("sin"),)),
    "erf": Op(torch.erf, "tl.erf({})", "f", "f", lambda y, x: ((-x * x).op("exp") * TWO_BY_ROOT_PI,)),
    "tanh": Op(torch.tanh, "tanh({})", "f", "f", lambda y, x: (1.0 - y * y,)),
    "sigmoid": Op(torch.sigmoid, "(1.0 / (1.0 + tl.exp(-{})))", "f", "f", lambda y, x: (y * (1.0 - y),)),
    "floor": Op(torch.floor, "tl.floor({})", "f", "f"),
    "ceil": Op(torch.ceil, "tl.ceil({})", "f", "f"),
    "pow": Op(torch.pow, "power({}, {})", "f", "f", _power),
    "idiv": Op(_floor_divide, "floor_divide({}, {})", "i", "i"),
    "mod": Op(torch.remainder, "floor_remainder({}, {})", "any", "=", lambda y, a, b: (1.0, -(a / b).op("floor"))),
    "eq": Op(operator.eq, "({} == {})", "any", "b"),
    "ne": Op(operator.ne, "({} != {})", "any", "b"),
    "lt": Op(operator.lt, "({} < {})", "any", "b"),
    "le": Op(operator.le, "({} <= {})", "any", "b"),
    "gt": Op(operator.gt, "({} > {})", "any", "b"),
    "ge": Op(operator.ge, "({} >= {})", "any", "b"),
    "and": Op(operator.and_, "({} & {})", "ib", "="),
    "or": Op(operator.or_, "({} | {})", "ib", "="),
    "xor": Op(operator.xor, "({} ^ {})", "ib", "="),
    "not": Op(torch.logical_not, "({} == 0)", "b", "b"),
    "shl": Op(operator.lshift, "({} << {})", "i", "i"),
    "shr": Op(operator.rshift, "({} >> {})", "i", "i"),
    "where": Op(torch.where, "tl.where({}, {}, {})", "any", "=", lambda y, c, a, b: (None, c, ~c)),
    "detach": Op(torch.detach, "{}", "any", "="),
}
"""Every operation by its name in programs."""
