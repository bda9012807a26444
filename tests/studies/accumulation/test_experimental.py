"""fp16 sums: the kernel and its emulation compute the same, and the stability factor keeps every sum in range."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from studies.accumulation import LARGEST, Accumulate, attention, rounded
from tilewise.attention import reference
from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.recipe import Recipe

EVERY = [
    Accumulate(scores, values, division, stability, exp2)
    for scores, values, (division, stability), exp2 in product(
        ("fp32", "fp16"),
        ("fp32", "fp16"),
        (("delayed", False), ("delayed", True), ("in-loop", False)),
        ("fp32", "halves"),
    )
]
BOTH = Accumulate("fp16", "fp16")
STABLE = Accumulate("fp32", "fp16", stability=True)
BACKENDS = ["cpu", "triton"]


def normal(M, N, H=2, H_k=2, D=16, D_v=16, B=1):
    return (torch.randn(B, S, h, d).half() for S, h, d in ((M, H, D), (N, H_k, D), (N, H_k, D_v)))


def exact(q, k, v, **options):
    return reference.attention(q.double(), k.double(), v.double(), **options)[0]


def error(o, truth):
    return float((o.double() - truth).norm() / truth.norm())


def equal_logits(v):
    """One query that weighs all keys alike."""
    v = v.reshape(1, -1, 1, 1).expand(-1, -1, -1, 16).half()
    return torch.zeros(1, 1, 1, 16).half(), torch.zeros_like(v), v


def needs(backend):
    return pytest.importorskip("triton") if backend == "triton" else None


# What is computed


@pytest.mark.parametrize("accumulate", EVERY, ids=str)
def test_the_kernel_computes_what_the_emulation_does(accumulate):
    needs("triton")
    q, k, v = normal(40, 70, H=4, H_k=2, D_v=24)
    mask, truth = tw.Causal(), exact(q, k, v, mask=tw.Causal())
    kernel, torch_ = (attention(q, k, v, mask=mask, accumulate=accumulate, backend=b) for b in ("triton", "cpu"))
    limit = 3e-3 if accumulate.exp2 == "halves" and accumulate.stability else 1.5e-3
    assert error(kernel, truth) < limit
    assert error(torch_, truth) < limit
    assert kernel.dtype == torch.float16
    assert kernel.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mask",
    [
        tw.Window(9, 0),
        tw.Documents(torch.arange(50)[None] // 20, torch.arange(50)[None] // 20),
        tw.Padding(torch.tensor([0])),
    ],
    ids=["window", "documents", "empty rows"],
)
def test_masks(backend, mask):
    needs(backend)
    q, k, v = normal(50, 50)
    truth = exact(q, k, v, mask=mask)
    o = attention(q, k, v, mask=mask, accumulate=BOTH, backend=backend)
    assert float((o.double() - truth).abs().max()) <= 5e-3
    assert torch.equal(o == 0.0, truth == 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_and_no_queries(backend):
    needs(backend)
    q, k, v = normal(3, 0)
    assert torch.equal(attention(q, k, v, backend=backend), torch.zeros(1, 3, 2, 16).half())
    q, k, v = normal(0, 3)
    assert attention(q, k, v, backend=backend).shape == (1, 0, 2, 16)


def test_scale():
    q, k, v = normal(20, 30)
    assert error(attention(q, k, v, scale=0.7), exact(q, k, v, scale=0.7)) < 2e-3


def test_one_word_means_both():
    q, k, v = normal(20, 30)
    assert torch.equal(attention(q, k, v, accumulate="fp16"), attention(q, k, v, accumulate=BOTH))
    assert torch.equal(attention(q, k, v, accumulate="fp32"), attention(q, k, v, accumulate=Accumulate()))


def test_sums_are_rounded_where_a_matrix_unit_rounds():
    ones = torch.ones(1, 4096)
    zero = torch.zeros(1, 1, dtype=torch.float16)
    assert float(rounded.dot(ones, ones.mT, zero, 1)) == 2048.0, "2048 + 1 rounds to 2048"
    assert float(rounded.dot(ones, ones.mT, zero, 16)) == 4096.0
    assert float(rounded.dot(ones, ones.mT, zero.float(), 1)) == 4096.0


def test_fp16_sums_lose_more_over_long_rows():
    q, k, v = normal(16, 4096)
    truth = exact(q, k, v)
    single, half = (error(attention(q, k, v, accumulate=Accumulate(values=kind)), truth) for kind in ("fp32", "fp16"))
    assert half > 3.0 * single


# The stability factor


@st.composite
def rows_of_v(draw):
    """Values that try to overflow: near the largest number, in orders that round upwards."""
    N = draw(st.integers(1, 600))
    kind = draw(st.sampled_from(["largest", "alternating", "one", "two levels", "near", "any"]))
    if kind == "two levels":
        low = draw(st.integers(40000, 65504))
        return torch.where(torch.arange(N) < draw(st.integers(0, N)), LARGEST, float(low))
    if kind == "one":
        return torch.where(torch.arange(N) == draw(st.integers(0, N - 1)), LARGEST, 0.0)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if kind == "alternating":
        return LARGEST * (1.0 - 2.0 * (torch.arange(N) % 2))
    if kind == "near":
        return LARGEST * (1.0 - 0.1 * torch.rand(N, generator=generator))
    if kind == "any":
        return torch.randn(N, generator=generator) * 10.0 ** draw(st.integers(-3, 4))
    return torch.full((N,), LARGEST)


@settings(max_examples=150, deadline=None)
@given(
    rows_of_v(), st.sampled_from([0.0, 0.01, 1.0, 30.0, 3000.0]), st.sampled_from([1, 4, 8, 16]),
    st.sampled_from([16, 64, 128]), st.sampled_from(["fp32", "halves"]), st.integers(0, 1000),
)  # fmt: skip
def test_with_the_factor_no_sum_ever_exceeds_the_largest_value(v, scale, depth, columns, exp2, seed):
    generator = torch.Generator().manual_seed(seed)
    N = v.numel()
    v = v.reshape(1, N, 1, 1).half()
    q, k = (torch.randn(1, S, 1, 16, generator=generator).half() * scale for S in (3, N))
    largest, seen = float(v.abs().max()), []

    def watched(a, b, acc, depth, dot=rounded.dot):
        if acc.dtype == torch.float32:
            return dot(a, b, acc, depth)
        for first in range(0, a.shape[-1], depth):
            acc = dot(a[..., first : first + depth], b[..., first : first + depth, :], acc, depth)
            seen.append(float(acc.abs().max()))
        return acc

    x, accumulate = Operands(q, k, v, ()), Accumulate("fp32", "fp16", stability=True, exp2=exp2)
    p = describe(x, Recipe(), (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded, "dot", watched)
        o = rounded.forward(p, x, accumulate, depth, columns)
    assert o.isfinite().all()
    assert len(seen) == sum(math.ceil(min(columns, N - first) / depth) for first in range(0, N, columns))
    assert max(seen) <= largest
    seen.clear()
    fitted = Accumulate("fp32", "fp16", stability=largest, exp2=exp2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded, "dot", watched)
        assert rounded.forward(p, x, fitted, depth, columns).isfinite().all()
    assert max(seen) <= LARGEST


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_without_it_two_large_values_overflow_and_with_it_none_do(backend, sign):
    needs(backend)
    for N in (2, 3, 50, 257):
        x = equal_logits(torch.full((N,), sign * LARGEST))
        free, stable = (
            attention(*x, accumulate=Accumulate("fp32", "fp16", stability=s), backend=backend) for s in (False, True)
        )
        assert free.isinf().all()
        assert stable.isfinite().all()
        assert error(stable, exact(*x)) < 1e-3
        assert attention(*x, accumulate=Accumulate("fp32", "fp32"), backend=backend).isfinite().all()


class Discussed(Accumulate):
    """The factor as it was proposed, which is enough in exact arithmetic."""

    def lower(self, N):
        return math.ceil(math.log(N)) / math.log(2.0)


def test_the_factor_as_proposed_is_not_enough():
    x = equal_logits(torch.full((1096,), LARGEST))
    assert 1096 * math.exp(-math.ceil(math.log(1096))) < 1.0
    assert attention(*x, accumulate=Discussed(values="fp16", stability=True)).isinf().all()
    o = attention(*x, accumulate=STABLE)
    assert o.isfinite().all()
    assert error(o, exact(*x)) < 1e-2


def test_division_in_the_loop_is_no_guarantee():
    x = equal_logits(torch.full((100,), LARGEST))
    assert attention(*x, accumulate=Accumulate(values="fp16", division="in-loop")).isinf().all()
    assert attention(*x, accumulate=STABLE).isfinite().all()


def test_a_finite_average_beyond_the_largest_number_is_a_rounding():
    for N in (7, 300, 1000):  # 1 / N in fp16 is too large for some
        x = equal_logits(torch.full((N,), LARGEST))
        for accumulate in (STABLE, Accumulate(exp2="halves", stability=True)):
            assert attention(*x, accumulate=accumulate).isfinite().all()
    x = equal_logits(torch.tensor([math.inf, 1.0]))
    assert attention(*x, accumulate=STABLE).isinf().all(), "what is infinite stays so"


def test_scores_overflow_and_nothing_hides_it():
    q = torch.full((1, 2, 1, 16), 100.0).half()
    v = torch.ones(1, 5, 1, 16).half()
    k = q[:, :1].expand(1, 5, 1, 16)  # q k = 160000
    for backend in BACKENDS:
        needs(backend)
        assert attention(q, k, v, accumulate=Accumulate(scores="fp16"), backend=backend).isnan().all()
        assert attention(q, k, v, accumulate=Accumulate(scores="fp32"), backend=backend).isfinite().all()


def test_the_factor_drops_small_weights():
    """One key of weight 1, and 4095 of 2^-13 each, which count for a third of o: lowered by 13, they are gone."""
    N = 4096
    k = torch.zeros(1, N, 1, 16).half()
    k[:, 0, :, 0] = 13.0
    q = torch.zeros(1, 1, 1, 16).half()
    q[..., 0] = 1.0
    v = torch.ones(1, N, 1, 16).half()
    x, log2 = (q, k, v), math.log(2.0)
    assert error(attention(*x, scale=log2, accumulate=Accumulate(values="fp16")), exact(*x, scale=log2)) < 1e-2
    stable = attention(*x, scale=log2, accumulate=STABLE)
    assert float(stable.mean()) == pytest.approx(1.0 / (1.0 + 4095 * 2.0**-13), rel=1e-2)


@pytest.mark.parametrize(
    ("accumulate", "N", "lower"),
    [
        (Accumulate(), 4096, 0),
        (STABLE, 4096, 13),
        (STABLE, 4097, 14),
        (STABLE, 1, 1),
        (STABLE, 0, 0),
        (Accumulate(stability=True, exp2="halves"), 4096, 14),
        (Accumulate(stability=True, exp2="halves"), 4090, 13),
        (Accumulate(stability=7.0), 4096, 0),
        (Accumulate(stability=8.0), 4096, 1),
        (Accumulate(stability=0.0), 4096, 0),
        (Accumulate(stability=1e9), 4096, 13),
    ],
)
def test_by_how_much_exponents_are_lowered(accumulate, N, lower):
    assert accumulate.lower(N) == lower


# Errors


def test_wrong_choices_are_named():
    for options, words in {
        (("scores", "bf16"),): ["scores", "'fp32' or 'fp16'", "'bf16'"],
        (("division", "never"),): ["division", "'delayed' or 'in-loop'", "'never'"],
        (("exp2", "fp16"),): ["exp2", "'fp32' or 'halves'", "'fp16'"],
        (("stability", -1.0),): ["stability", ">= 0", "-1.0"],
        (("stability", True), ("division", "in-loop")): ["stability", "division='delayed'", "leave one"],
    }.items():
        with pytest.raises(ValueError, match="Accumulate") as caught:
            Accumulate(**dict(options))
        assert all(word in str(caught.value) for word in words), caught.value


def test_wrong_calls_are_named():
    q, k, v = normal(4, 5)
    with pytest.raises(TypeError, match=r"fp16, got torch.float32.*\.half\(\)"):
        attention(q.float(), k.float(), v.float())
    with pytest.raises(TypeError, match="accumulate must be 'fp16', 'fp32' or an Accumulate, got 16"):
        attention(q, k, v, accumulate=16)
    with pytest.raises(ValueError, match="scores must be 'fp32' or 'fp16', got 'half'"):
        attention(q, k, v, accumulate="half")
    with pytest.raises(ValueError, match="backend must be None or one of triton, cpu, got 'hopper'"):
        attention(q, k, v, backend="hopper")
    with pytest.raises(TypeError, match="mask must be a Mask"):
        attention(q, k, v, mask=torch.ones(4, 5))
    with pytest.raises(ValueError, match="one head size"):
        attention(q, k[..., :8], v)
    with pytest.raises(RuntimeError, match="no gradient"):
        attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert attention(q, k, v).isfinite().all()


def test_chips_without_fp16_accumulators_refuse():
    needs("triton")
    from studies.accumulation import launch

    x = Operands(*normal(4, 5), ())
    p = describe(x, Recipe(), (0, 0))
    for target in ("gfx942", "gfx1100", "sm_75", "sm_100"):
        (reason,) = launch.why_not(p._replace(target=target), BOTH)
        assert target in reason
        assert "sm_90" in reason
    assert launch.why_not(p._replace(target="sm_90"), BOTH) == []
