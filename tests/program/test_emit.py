"""Programs as device functions, in Triton's interpreter and compiled for a chip that is not here."""

import pytest
import torch
from known import remember
from program.functions import B, H, M, N, examples
from scripts import lines

from tilewise.program import Entries, apply, keep, pull, run, trace

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl
from program.emitted import mask_part, score_part, scored, seen

from tilewise.host.arguments import odd
from tilewise.host.emit import Form, arguments, by_output, functions, is_finite, source

AT = Entries.of(B, H, M, N)
EXAMPLES = examples()
FIRST = Form(rows="first")


@triton.jit
def saturated(x, limit):
    """Compute what Hopper's function of this name does (hopper/parts/scores.py)."""
    return limit - 2.0 * limit / (1.0 + tl.exp2(x))


def traced(name):
    example = EXAMPLES[name]
    return trace(example.fn, example.what, example.tensors)


def logits():
    """Logits and their gradients, of which some are 0."""
    dS = torch.randn(B, H, M, N)
    return torch.randn(B, H, M, N), dS.masked_fill(torch.rand(dS.shape) < 0.1, 0.0)


def of_torch(found, S, dS):
    """What run.py computes, in fp64."""
    program, tensors, numbers = found
    tensors = [t.detach().double() if t.is_floating_point() else t for t in tensors]
    S, dS = S.double(), dS.double()
    return apply(program, S, AT, tensors, numbers), pull(program, dS, S, AT, {}, tensors, numbers)


def assert_close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.what == "mask"])
@pytest.mark.parametrize("wide", [False, True])
def test_masks(name, wide):
    found = traced(name)
    want = keep(found.program, AT, found.tensors, found.numbers).expand(B, H, M, N)
    assert torch.equal(seen(mask_part(found, FIRST._replace(wide=wide), (N - M,)), B, H, M, N), want)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.what == "score"])
@pytest.mark.parametrize(("of_hopper", "steps"), [(None, False), (saturated, False), (saturated, True)])
def test_scores_and_their_gradients(name, of_hopper, steps):
    found, (S, dS) = traced(name), logits()
    form = FIRST._replace(steps=steps) if of_hopper else FIRST._replace(narrow=True)
    got = scored(score_part(found, form, (N - M,), saturated=of_hopper), S, dS)
    for x, want in zip(got, of_torch(found, S, dS), strict=True):
        assert_close(x, want)


def score_of(fn, *captured, form=FIRST, place=(N - M,), **options):
    """What an emitted score and its gradient compute, and what run.py does."""
    found, (S, dS) = trace(fn, "score", captured), logits()
    got = scored(score_part(found, form, place, **options), S, dS)
    return zip(got, of_torch(found, S, dS), strict=True)


def mask_of(fn, *captured, form=FIRST, place=(N - M,)):
    """What an emitted mask shows."""
    return seen(mask_part(trace(fn, "mask", captured), form, place), B, H, M, N)


def test_rows_are_counted_from_the_first_or_the_last():
    """In packed sequences, from the first of each."""

    def fn(b, h, i, j):
        return j <= i

    first, last = AT.j <= AT.i, AT.j <= AT.i + N - M
    assert torch.equal(mask_of(fn)[0, 0], first)
    assert torch.equal(mask_of(fn, form=Form(), place=())[0, 0], last)
    cu_q, cu_k = torch.tensor([0, 3, 3 + M]), torch.tensor([0, 7, 7 + N])
    got = mask_of(fn, form=Form(rows="first", packed=True), place=(cu_q, cu_k))
    assert torch.equal(got[1, 0], first)  # the first sequence has other lengths than the kernel here
    (got, want), _ = score_of(lambda s, b, h, i, j: s + i, form=Form(), place=())
    assert_close(got, want + (N - M))


@pytest.mark.parametrize("divisor", [-7, -4, -1, 1, 2, 3, 8])
def test_division_rounds_down(divisor):
    """Whatever the signs, and whether the divisor is in the program or given."""
    for x, want in score_of(lambda s, b, h, i, j: s + (i - j) // divisor * 100 + (i - j) % divisor):
        assert_close(x, want)

    def fn(s, b, h, i, j, n):
        return s + (i - j) // n * 100 + (i - j) % n + j // n * 7 + (j + 0.25 - i) % n

    for x, want in score_of(fn, divisor):
        assert_close(x, want)


def test_bools_are_ordered():

    def fn(b, h, i, j):
        return ((i < 4) < (j < 4)) | ((i < 9) >= (j < 12)) & (j > 2)

    assert torch.equal(mask_of(fn)[0, 0], fn(0, 0, AT.i, AT.j))


def test_whole_numbers_have_64_bits_where_they_need_them():
    large = torch.arange(N) + 2**40

    def fn(b, h, i, j):
        return i * 2**40 + j > (j + 5) * 2**40

    assert torch.equal(mask_of(fn)[0, 0], fn(0, 0, AT.i, AT.j))
    assert torch.equal(mask_of(lambda b, h, i, j: large[j] - 2**40 <= i)[0, 0], AT.j <= AT.i)

    def square(b, h, i, j):
        return (i + 2**20) * (j + 2**20) > 2**40

    assert "int64" in source(trace(square, "mask").program.text, FIRST)

    def smaller(b, h, i, j):
        return (i + 2**16) * (j + 2**16) > 2**30

    assert mask_of(smaller, form=FIRST._replace(wide=True)).all()
    assert not mask_of(smaller).any()


def test_negative_indices_count_from_the_end_and_others_outside_read_0():
    table = torch.randn(N)
    index = AT.i - AT.j
    want = torch.where(index < 0, table[index % N], table[index.clamp(min=0)])
    (got, _), _ = score_of(lambda s, b, h, i, j: s * 0 + table[i - j])
    assert torch.equal(got[0, 0], want)
    found, (S, dS) = trace(lambda s, b, h, i, j: s * 0 + table[2 * j - i], "score"), logits()
    index = 2 * AT.j - AT.i
    want = torch.where(index < N, table[index.clamp(max=N - 1)], 0.0)
    assert torch.equal(scored(score_part(found, FIRST, (N - M,)), S, dS)[0][0, 0], want)


@pytest.mark.parametrize("of_hopper", [None, saturated])
@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, i, j: 0.5, lambda s, b, h, i, j: h * 0.5, lambda s, b, h, i, j: torch.tanh(i / 4),
        lambda s, b, h, i, j: j * 0.5, lambda s, b, h, i, j, t: t[j], lambda s, b, h, i, j, t: t[0] * t[-1],
    ],
)  # fmt: skip
def test_scores_that_do_not_read_s_have_its_shape(fn, of_hopper):
    """Infinite logits change nothing."""
    captured = (torch.randn(N),) if fn.__code__.co_argcount == 6 else ()
    found, (S, dS) = trace(fn, "score", captured), logits()
    S[0, 0, 0, :3] = torch.tensor([-torch.inf, torch.inf, torch.nan])
    T, dS_in = scored(score_part(found, FIRST, (N - M,), saturated=of_hopper), S, dS)
    assert_close(T, apply(found.program, S, AT, found.tensors).double())
    assert torch.equal(dS_in, torch.zeros_like(S))


def test_captured_numbers_and_tensors():
    """Numbers come first, then tensors with strides and sizes; those that no result needs are left out."""
    table, unread = torch.randn(H, N)[:, ::2].requires_grad_(), torch.randn(3)

    def fn(s, b, h, i, j, n, unread, table, x, no):
        return torch.where(no, s, s * x + table[h, j // n] + unread[h] * 0)

    for x, want in score_of(fn, 2, unread, table, 0.75, False):
        assert_close(x, want)

    def less(s, b, h, i, j, n, unread, table, x):
        return s * x + table[h, j]

    found = trace(less, "score", (2, unread, table, 0.75))
    got = arguments(found.program.text, found.tensors, found.numbers, (N - M,))
    assert got == (0.75, table, N, 2, odd(H), 9, odd(N - M)), "a size of rows is itself"


def test_one_function_for_equal_programs():
    """A lambda made anew compiles nothing; different ones can be in one kernel."""

    def make(n):
        return trace(lambda b, h, i, j: i + n >= j, "mask").program.text

    assert functions(make(2)) == functions(make(2), Form())
    assert functions(make(2))["keep"] is functions(make(2))["keep"]
    other = functions(make(3))["keep"]
    assert other.fn.__module__ != functions(make(2))["keep"].fn.__module__


def test_absolute_distances_need_no_abs_in_the_past():
    text = trace(lambda s, b, h, i, j: s - (i - j).abs() - abs(i + 2 - j), "score").program.text
    assert source(text, Form()).count("abs") == 2
    assert "abs" not in source(text, Form(past=True))
    assert "abs" in source(trace(lambda s, b, h, i, j: s - abs(i - j - 1), "score").program.text, Form(past=True))


def test_terms_of_distances_are_subtracted_one_by_one_where_registers_are_few():
    text = trace(lambda s, b, h, i, j, x: s - x * abs(i - j), "score", (0.5,)).program.text
    of_sum, by_term = (source(text, Form(past=True, steps=steps), hopper=True) for steps in (False, True))
    assert "(s - x" in of_sum
    assert "(s - f0 * tl.cast((row0 - column0), tl.float32) - f0 * tl.cast((row - column), tl.float32))" in by_term


def test_numbers_that_are_not_0_keep_scores_finite():
    text = trace(lambda s, b, h, i, j, x: torch.tanh(s / x), "score", (0.5,)).program.text
    assert is_finite(text, (False,))
    assert not is_finite(text, (True,))
    assert not is_finite(text)


def test_derivatives_by_the_output():
    """On Hopper, S need not stay in registers. What T is matters only where dS is not 0."""
    for fn in (
        lambda s, b, h, i, j, cap: cap * torch.tanh(s / cap),
        lambda s, b, h, i, j, cap: -2.0 * torch.sigmoid(s * cap),
        lambda s, b, h, i, j, cap: torch.exp(s),
    ):
        found, (S, dS) = trace(fn, "score", (1.5,)), logits()
        derived = by_output(found.program.text)
        assert ("in", "s") not in derived.nodes
        part = score_part(found, FIRST, (N - M,), saturated=saturated)
        for x, want in zip(scored(part, S, dS), of_torch(found, S, dS), strict=True):
            assert_close(x, want)
        for T in (-torch.inf, 1e30, torch.inf):
            assert run(derived, {"g": torch.zeros(()), "fT": torch.tensor(T)}, (), found.numbers) == [0.0]
    for name in ("gelu_by_tanh", "alibi", "saturated", "unchanged"):
        assert by_output(traced(name).program.text) is None, name


def test_powers_of_negative_numbers():
    base = torch.tensor([-2.0, -0.5, 0.0, 3.0])

    def fn(s, b, h, i, j):
        return s + base[j % 4] ** torch.where(i < 2, 3.0, torch.where(i < 5, 0.0, 2.0))

    (got, want), _ = score_of(fn)
    assert_close(got, want)


@pytest.mark.compile
@pytest.mark.parametrize("kernel", ["triton", "gluon"])
def test_all_functions_compile(kernel):
    """For sm_90, in kernels of both languages."""
    found = lines("program/emit_compiled.py", kernel)
    assert {row["name"] for row in found} >= set(EXAMPLES)
    remember(found[0]["triton"], f"program/emit_compiled.py {kernel}", found)


BY_HAND = {
    "triton": {"softcap": (571, 805), "alibi": (253, 433), "alibi_past": (253, 433), "bias": (263, 376)},
    "gluon": {"softcap": (296, 287), "alibi": (221, 167), "alibi_past": (209, 167), "bias": (246, 167)},
}
"""Instructions of the functions that were written by hand before, forward and backward."""


@pytest.mark.compile
def test_rules_compile_as_well_as_functions_written_by_hand():
    found = [row for row in lines("program/emit_compiled.py", "counts") if row["name"] != "nothing"]
    assert len(found) == 16
    for row in found:
        assert row["instructions"] <= 1.01 * BY_HAND[row["kernel"]][row["name"]][row["grad"]], row
