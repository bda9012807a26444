"""Derivatives of programs: against autograd on all examples, again differentiated, and where factors are infinite."""

import math

import pytest
import torch
from program.functions import SCORES, B, H, M, N, examples

from tilewise.program import Entries, Program, apply, decode, derivative, pull, run, trace, zero_sums

AT = Entries.of(B, H, M, N)
EXAMPLES = examples()


@pytest.fixture(autouse=True)
def in_fp64():
    """Whole numbers times floating ones are then fp64 in torch, too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class OfProgram(torch.autograd.Function):
    """A score with the derivative that its program has."""

    @staticmethod
    def forward(ctx, program, S, *tensors):
        ctx.program = program
        ctx.save_for_backward(S, *tensors)
        return apply(program, S, AT, tensors)

    @staticmethod
    def backward(ctx, *gradients):
        S, *tensors = ctx.saved_tensors
        sums = zero_sums(tensors, S.dtype)
        dS = pull(ctx.program, gradients[0], S, AT, sums, tensors)
        return None, dS, *[sums.get(n) for n in range(len(tensors))]


def logits():
    return torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("name", SCORES)
def test_gradients_match_autograd(name):
    example = EXAMPLES[name].to(torch.float64)
    traced = trace(example.fn, "score", example.tensors)
    S = logits()
    learn = [S, *[t for t in traced.tensors if t.requires_grad]]
    weight = torch.randn(S.shape)

    def gradients(P):
        hidden = P.isinf()  # as in softmax: probabilities of 0 have no gradient
        return torch.autograd.grad((P.masked_fill(hidden, 0.0) * weight).sum(), learn, materialize_grads=True)

    got, want = OfProgram.apply(traced.program, S, *traced.tensors), example.fn(S, *AT[:4], *example.tensors)
    torch.testing.assert_close(got, want.expand(S.shape), rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(gradients(got), gradients(want), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12 * theirs.abs().max().item())


GRADCHECKED = (
    "softcap",
    "relative",
    "t5",
    "gelu",
    "one_bias_twice",
    "temperature",
    "forgetting",
    "kerple",
    "fire",
    "powers",
)


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name):
    example = EXAMPLES[name].to(torch.float64)
    traced = trace(example.fn, "score", example.tensors)

    def some(S, *tensors):
        whole = logits().detach().index_put((torch.tensor(0),), S)
        return OfProgram.apply(traced.program, whole, *tensors)

    assert torch.autograd.gradcheck(some, (logits()[0].detach().requires_grad_(), *traced.tensors), fast_mode=True)


@pytest.mark.parametrize(
    "name", ["softcap", "gelu", "saturated", "softplus_and_mish", "powers", "checkers", "kerple", "alibi"]
)
def test_second_derivatives_match_autograd(name):
    """The derivative of ds is a program, too; and by g it is the factor that forward mode needs."""
    example = EXAMPLES[name].to(torch.float64)
    program, tensors, _ = trace(example.fn, "score", example.tensors)
    S, g, gg = logits(), torch.randn(B, H, M, N, requires_grad=True), torch.randn(B, H, M, N)
    (dS,) = torch.autograd.grad(example.fn(S, *AT[:4], *example.tensors), S, g, create_graph=True)
    want = torch.autograd.grad(dS, (S, g), gg, materialize_grads=True)
    given = AT._asdict() | {"s": S.detach(), "g": g.detach(), "gg": gg}
    for by, expected in zip("sg", want, strict=True):
        second = derivative(derivative(program.text).text, by=by)
        (got,) = run(second, given, tensors, real=torch.float64)
        torch.testing.assert_close(got.detach().expand(S.shape), expected, rtol=1e-11, atol=1e-11)


def of(fn, S, g, *tensors):
    """Return ds and the gradients of captured tensors for numbers S and g, each the logits of one entry."""
    traced = trace(fn, "score", tensors)
    S, g = [torch.tensor(x, dtype=torch.float64).view(1, 1, 1, -1) for x in (S, g)]
    sums = zero_sums(tensors, torch.float64)
    dS = pull(traced.program, g, S, Entries.of(1, 1, 1, S.shape[-1]), sums, tensors)
    return dS.flatten().tolist(), [x.tolist() for x in sums.values()]


BRANCHES = {
    "log": lambda s, b, h, i, j: torch.where(s > 0, torch.log(s), s),
    "sqrt": lambda s, b, h, i, j: torch.where(s > 0, torch.sqrt(s), s),
    "reciprocal": lambda s, b, h, i, j: torch.where(s > 0, 1 / s, s),
    "power": lambda s, b, h, i, j: torch.where(s > 0, s**1.5, s),
    "overflow": lambda s, b, h, i, j: torch.where(s < 1000, torch.exp(s) * s, s),
    "elu": lambda s, b, h, i, j: torch.nn.functional.elu(s),
    "masked_fill": lambda s, b, h, i, j: torch.log(s).masked_fill(s <= 0, 0.0) + s,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_not_taken_passes_nothing(name):
    """In torch each of these is NaN for some of these logits."""
    (dS, _) = of(BRANCHES[name], [0.0, -1.0, 1e4], [1.0, 1.0, 1.0])
    assert all(math.isfinite(x) for x in dS)


def test_hidden_entries_have_no_gradient():
    """The gradient of an entry with -inf is 0, and stays 0 where a factor is infinite or NaN."""
    tau, weight = torch.tensor(2.0, requires_grad=True), torch.tensor([0.0, 1.0], requires_grad=True)
    dS, (dtau,) = of(lambda s, b, h, i, j, tau: s * tau, [-math.inf, 3.0], [0.0, 1.0], tau)
    assert (dS, dtau) == ([0.0, 2.0], 3.0)
    dS, (dweight,) = of(lambda s, b, h, i, j, weight: s + weight[j].log(), [1.0, 3.0], [0.0, 1.0], weight)
    assert (dS, dweight) == ([0.0, 1.0], [0.0, 1.0])
    dS, _ = of(lambda s, b, h, i, j: torch.log(torch.relu(s)), [-1.0, 2.0, 0.0], [0.0, 1.0, 0.0])
    assert dS == [0.0, 0.5, 0.0]


def test_an_infinite_gradient_remains():
    dS, _ = of(lambda s, b, h, i, j: torch.sqrt(s), [0.0, 4.0], [1.0, 1.0])
    assert dS == [math.inf, 0.25]


def test_ties():
    """relu has no gradient at 0, and clamp has one at its ends, as in torch."""
    assert of(lambda s, b, h, i, j: torch.relu(s), [0.0, 1.0], [1.0, 1.0])[0] == [0.0, 1.0]
    assert of(lambda s, b, h, i, j: s.clamp(0, 2), [0.0, 2.0, 3.0], [1.0, 1.0, 1.0])[0] == [1.0, 1.0, 0.0]


def test_detached_numbers_have_no_gradient():
    tau = torch.tensor([2.0], requires_grad=True)
    dS, (dtau,) = of(lambda s, b, h, i, j, tau: s.detach() * tau[h] + tau[h].detach() * s, [3.0], [1.0], tau)
    assert (dS, dtau) == ([2.0], [3.0])


def test_outputs():
    """The outputs are ds, a number per gather from a tensor that learns, and the gathers' indices if wanted."""
    traced = trace(lambda s, b, h, i, j: s + EXAMPLES["one_bias_twice"].closed(s, b, h, i, j) * 2, "score")
    assert len(derivative(traced.program.text).outputs) == 1
    assert len(derivative(traced.program.text, (0,)).outputs) == 3
    assert len(derivative(traced.program.text, (0,), indices=True).outputs) == 7


def test_derivatives_that_say_nothing():
    """An unchanged score has g itself, a constant none; whole numbers and bools pass none."""
    assert derivative(trace(lambda s, b, h, i, j: s + i * 2, "score").program.text).nodes == (("in", "g"),)
    for fn in (lambda s, b, h, i, j: 1.0, lambda s, b, h, i, j: (s > 0) * 2.0, lambda s, b, h, i, j: s.long() + 1):
        assert derivative(trace(fn, "score").program.text) == Program((("lit", 0.0),), (0,))


def test_derivatives_are_texts():
    text = trace(EXAMPLES["gelu"].fn, "score").program.text
    assert derivative(text) is derivative(text)
    assert decode(derivative(text).text) == derivative(text)


def test_numbers_of_finite_factors_need_no_selection():
    """Multiplying by a finite number costs one operation: Hopper's loops have few registers."""
    for name, most in {"softcap": 12, "alibi": 1, "temperature": 6, "relative": 1}.items():
        program = derivative(trace(EXAMPLES[name].fn, "score", EXAMPLES[name].tensors).program.text)
        assert len(program.nodes) <= most
        assert "where" not in program.text
