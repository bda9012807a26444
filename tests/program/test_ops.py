"""Each operation of the table, and each function that programs know, against torch: results and derivatives."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tilewise.program import FUNCTIONS, Entries, apply, derivative, keep, pull, run, trace
from tilewise.program.ops import OPS
from tilewise.program.program import Builder

AT = Entries.of(2, 3, 5, 7)
SHAPE = (2, 3, 5, 7)

OPERATIONS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "abs": torch.abs,
    "min": torch.minimum, "max": torch.maximum, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log,
    "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "floor": torch.floor, "ceil": torch.ceil, "pow": torch.pow,
    "idiv": torch.floor_divide, "mod": torch.remainder, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.logical_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "where": torch.where,
    "detach": torch.detach,
}  # fmt: skip
"""What each operation is in torch."""
BINARY = (
    "add", "sub", "mul", "div", "min", "max", "pow", "idiv", "mod", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
    "xor", "shl", "shr",
)  # fmt: skip


def test_every_operation_has_a_line():
    assert list(OPERATIONS) == list(OPS)


def operands(name, kind):
    """Return operands of a kind; floating ones are positive, and require gradients."""
    draw = torch.Generator().manual_seed(0)
    count = 3 if name == "where" else 2 if name in BINARY else 1
    if kind == "f":
        some = [torch.rand(SHAPE, generator=draw, dtype=torch.float64).add(0.1).requires_grad_() for _ in range(count)]
    else:
        some = [torch.randint(1, 7 if kind == "i" else 2, SHAPE, generator=draw) for _ in range(count)]
    some = [x.bool() if kind == "b" else x for x in some]
    return [torch.rand(SHAPE, generator=draw) < 0.5, *some[1:]] if name == "where" else some


@pytest.mark.parametrize("name", OPS)
def test_operations_and_their_derivatives_match_torch(name):
    takes = OPS[name].takes
    for kind in {"any": "fi", "ib": "ib"}.get(takes, takes):
        given = operands(name, kind)
        build = Builder()
        kinds = ["b" if x.dtype is torch.bool else kind for x in given]
        inputs = [build.wrap(build.add(("in", f"{kind}{n}"))) for n, kind in enumerate(kinds)]
        program = build.done([build.op(name, *inputs).n])
        named = {f"{kind}{n}": x for n, (kind, x) in enumerate(zip(kinds, given, strict=True))}
        (got,) = run(program, named, real=torch.float64)
        want = OPERATIONS[name](*given)
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
        assert program.kinds[-1] == {torch.float64: "f", torch.int64: "i", torch.bool: "b"}[want.dtype]
        if kind != "f" or want.dtype != torch.float64:
            continue
        if OPS[name].derivative is None:
            assert derivative(program.text, by="f0").nodes == (("lit", 0.0),)
            continue
        g = torch.randn(SHAPE, dtype=torch.float64)
        learn = {key: x for key, x in named.items() if x.requires_grad}
        by_torch = torch.autograd.grad((want * g).sum(), list(learn.values()))
        for key, dx in zip(learn, by_torch, strict=True):
            (ds,) = run(derivative(program.text, by=key), named | {"g": g}, real=torch.float64)
            torch.testing.assert_close(ds.expand(SHAPE), dx, rtol=1e-13, atol=1e-13)


UNARY = (
    "neg", "negative", "abs", "absolute", "exp", "exp2", "log", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan",
    "erf", "tanh", "sigmoid", "expit", "floor", "ceil", "trunc", "fix", "square", "reciprocal", "log1p", "expm1",
    "logit", "relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "softplus", "logsigmoid", "mish", "softsign",
    "hardtanh", "sign", "sgn", "clone", "squeeze", "positive", "detach", "zeros_like", "ones_like",
)  # fmt: skip
TWO = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "remainder", "minimum", "maximum",
    "fmin", "fmax", "pow", "float_power", "rsub",
)  # fmt: skip
MORE = {
    "add, alpha": lambda s, j: torch.add(s, (j + 1) * 0.3, alpha=3) + torch.sub(s, 2, alpha=0.5),
    "rsub, alpha": lambda s, j: torch.rsub(s, (j + 1) * 0.3, alpha=3),
    "div, rounding": lambda s, j: torch.div(s, 0.3, rounding_mode="floor") + torch.div(-s, 0.3, rounding_mode="trunc"),
    "div of whole numbers": lambda s, j: (
        s + torch.div(2 - j, 2, rounding_mode="trunc") // 2 + torch.div(2 - j, 2, rounding_mode="floor") + j.trunc()
    ),
    "clamp": lambda s, j: s.clamp(0.2, 0.9) + torch.clip(s, max=0.5) + s.clamp_min(0.3) * torch.clamp_max(s, 0.8),
    "gelu, tanh": lambda s, j: F.gelu(s, approximate="tanh"),
    "softplus, beta": lambda s, j: F.softplus(s, 3.0, 2.0),
    "elu, alpha": lambda s, j: F.elu(s - 0.5, 2.0) + F.leaky_relu(s - 0.5, negative_slope=0.3),
    "logit, eps": lambda s, j: torch.logit(s / 4, eps=0.1),
    "where": lambda s, j: torch.where(j > 3, s, 1.0) + (s + 1).where(j < 2, s) + torch.where(j > 3, 1.0, s),
    "masked_fill": lambda s, j: s.masked_fill(j > 3, -2) + torch.masked_fill(s, j == 0, 1.0),
    "lerp": lambda s, j: torch.lerp(s, (j + 1) * 0.3, 0.3) + s.lerp((j + 1) * 0.3, s),
    "addcmul": lambda s, j: torch.addcmul(s, s, (j + 1) * 0.3, value=0.5) + torch.addcdiv(s, s, (j + 1) * 0.3, value=2),
    "powers": lambda s, j: s**0 + s**1 + s**2 + s**-3 + s**0.5 + s**-0.5 + s**1.7 + 2**s + 3.0**s + 2.0**j,
    "full_like": lambda s, j: torch.full_like(s, 2.0) + s.new_zeros(()) + s.new_ones(()) * s,
    "types": lambda s, j: s + j.to(s.dtype) + j.float() + j.double() + (s * 9).long() + (s * 9).int().to(torch.int16),
    "type_as": lambda s, j: s + j.type_as(s) + j.to(dtype=s.dtype) + (j > 2).int() + s.to("cpu"),
    "operators": lambda s, j: +s - -s + 1 - s * 2 + 2 / s + abs(s - 0.5) + s % 0.3 + 5 % (j + 1) - 7 // (j + 1),
    "floor_divide": lambda s, j: s + torch.floor_divide(s.detach(), 0.3) + s.detach() // 0.3 + torch.floor_divide(j, 2),
    "log_sigmoid": lambda s, j: torch._C._nn.log_sigmoid(s),
    "methods": lambda s, j: s.contiguous() + s.tanh() + s.double() + j.float(),
    "whole": lambda s, j: s + (j**2 - (j - 5).abs() + (-j) // 2 + (-j) % 3 + j.clamp(1, 4) + torch.sign(j - 2)),
    "bits": lambda s, j: s + ((j << 2) >> 1) + (j & 3) + (j | 4) + (j ^ 5) + ~j + (1 << j % 4),
    "bitwise": lambda s, j: (
        s + torch.bitwise_and(j, 3) + torch.bitwise_or(j, 4) + torch.bitwise_xor(j, 5) + torch.bitwise_not(j)
    ),
    "shifts": lambda s, j: s + torch.bitwise_left_shift(j, 2) + torch.bitwise_right_shift(j, 1),
    "logic": lambda s, j: s + torch.logical_and(s > 0.5, j) + (torch.logical_not(j) ^ torch.logical_xor(j, s > 0.5)),
    "logical_or": lambda s, j: s + torch.logical_or(j > 4, s > 0.9).bool(),
    "arithmetic of bools": lambda s, j: s + ((j > 2) + (s > 0.5)) + (j > 2) * (s > 0.5) + (j > 3) * 2 - (j > 3).long(),
    "comparisons": lambda s, j: s + (
        torch.eq(j, 2) ^ torch.ne(s, 0.5) ^ torch.lt(j, s) ^ torch.le(s, j) ^ torch.gt(s, 0.7) ^ torch.ge(j, 3)
    ),
    "longer names": lambda s, j: s + (
        torch.less(j, 2) ^ torch.less_equal(s, j) ^ torch.greater(s, 0.7) ^ torch.greater_equal(j, 3)
        ^ torch.not_equal(j, 1)
    ),
    "not finite": lambda s, j: s + torch.isnan(s) + torch.isinf(s / (j - 2)).int() + torch.isfinite(s / (j - 3)).int(),
    "sizes": lambda s, j: s + s.numel() * 0 + len(s.size()) * 0 + s.is_floating_point() + j.is_floating_point(),
    "constants": lambda s, j: s + torch.tensor(3.0) * torch.full((), 2) + torch.arange(3)[2] + torch.tensor(1.0).exp(),
}  # fmt: skip


def of_torch(name):
    return next(getattr(module, name) for module in (torch, torch.special, F) if hasattr(module, name))


@pytest.fixture
def in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("name", [*UNARY, *TWO, *MORE])
def test_functions_match_torch(name):
    """The function is traced, and called on tensors; autograd's derivative is compared, too."""

    def fn(s, b, h, i, j):
        if name in MORE:
            return MORE[name](s, j)
        return of_torch(name)(s, (j + 1) * 0.3) if name in TWO else of_torch(name)(s)

    S = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)).mul(0.9).add(0.05).requires_grad_()
    program = trace(fn, "score").program
    want = fn(S, *AT[:4]).double().expand(SHAPE)
    torch.testing.assert_close(apply(program, S.detach(), AT), want.detach(), rtol=1e-13, atol=1e-13)
    g = torch.randn(SHAPE)
    dS = torch.autograd.grad((want * g).sum(), S)[0] if want.requires_grad else torch.zeros(SHAPE)
    torch.testing.assert_close(pull(program, g, S.detach(), AT, {}), dS, rtol=1e-12, atol=1e-12)


def test_names_that_leave_a_number_as_it_is():
    """Devices, shapes and narrower types say nothing in a program."""

    def fn(s, b, h, i, j):
        same = torch.as_tensor(s.cpu().cuda()).expand_as(s).view_as(s) + s.dim()
        return same + torch.asarray(torch.tensor(s.half().bfloat16())) + i.short().type(torch.int8)

    assert [node[0] for node in trace(fn, "score").program.nodes] == ["in", "in", "add", "cast", "add"]


def test_masks_of_constants():
    """The second is how FlexAttention's users write a mask that hides nothing."""
    assert keep(trace(lambda b, h, i, j: b.new_ones(size=(), dtype=torch.bool), "mask").program, AT).all()
    assert keep(trace(lambda b, h, i, j: i >= -math.inf, "mask").program, AT).all()
    assert not keep(trace(lambda b, h, i, j: torch.tensor(False), "mask").program, AT).any()


def test_every_function_is_compared():
    """The others are names of Python's operators and of NumPy's functions."""
    source = Path(__file__).read_text().split("def test_every_function")[0]
    missing = {name for name in FUNCTIONS if not re.search(rf"\b{name.removeprefix('Tensor.')}\b", source)}
    assert missing == {"invert", "lshift", "rshift", "floordiv", "truediv", "pos", "power", "scalar_tensor"}
