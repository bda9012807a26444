"""PyTorch's kernel on a CPU: where it is taken, strips under masks, sums of gradients, and what a tiny call costs."""

import sys

import pytest
import torch
from conformance.test_conformance import chosen

import tilewise as tw
from tilewise.attention import reference
from tilewise.call import calls
from tilewise.call.backend import load
from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.recipe import Recipe
from tilewise.cpu import fused, strips

UNITS = "tilewise.cpu.fused.bf16_units"


@pytest.fixture(autouse=True)
def nothing_known():
    calls.forget()
    yield
    calls.forget()


@pytest.mark.parametrize("units", [False, True])
def test_bf16_is_fused_where_the_processor_multiplies_it(monkeypatch, units):
    monkeypatch.setattr(UNITS, lambda: units)
    q = torch.randn(1, 40, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    plan = tw.explain(q, q, q)
    assert [name.partition(",")[0] for name in (plan.tiles, plan.backward_tiles)] == [
        "PyTorch's fused CPU kernel" if units else "tiled torch"
    ] * 2
    if units:  # from here on there is nothing else
        for pass_ in ("forward", "backward"):
            monkeypatch.setattr(f"tilewise.cpu.tiled.{pass_}", None)
    else:
        monkeypatch.setattr(fused, "flash", None)
        monkeypatch.setattr(fused, "flash_backward", None)
    for _ in range(3):
        tw.attention(q, q, q).sum().backward()


@pytest.mark.parametrize("missing", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_a_torch_that_does_not_know_units_has_none(monkeypatch, missing):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name != missing, raising=False)
    assert fused.bf16_units.__wrapped__()
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert not fused.bf16_units.__wrapped__()


def gradients(x, do, mask, path="cpu", **options):
    leaves = [t.detach().clone().requires_grad_() for t in x]
    with chosen(path):
        o, lse = tw.attention(*leaves, mask=mask, return_lse=True, **options)
        return o, lse, *torch.autograd.grad(o, leaves, do)


@pytest.mark.skipif(not fused.bf16_units(), reason="this processor multiplies no bf16, so such calls are not fused")
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=str)
def test_bf16_gradients_of_many_queries_keep_their_accuracy(mask):
    """The kernel alone rounds sums to bf16 for each of its blocks: then dk and dv would be off by 4 times as much.
    Where a processor has no units for bf16, the kernel rounds more often."""
    N = 6144
    x, do = [torch.randn(1, N, 1, 16, dtype=torch.bfloat16) for _ in range(3)], torch.randn(1, N, 1, 16).bfloat16()
    true = gradients([t.double() for t in x], do.double(), mask)
    tiled, kernel = gradients(x, do, mask, "cpu-tiled"), gradients(x, do, mask)
    for exact, one, other in zip(true, tiled, kernel, strict=True):
        tiles, found = (
            (t.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt() for t in (one, other)
        )
        assert found <= 2.2 * tiles + 1e-5


def masks():
    return {
        "causal": (tw.Causal(), ()), "window": (tw.Window(9, 3), ()), "both": (tw.Causal() & tw.Window(20, 0), ()),
        "padding": (tw.Padding(torch.tensor([70, 30])), ()), "dense": (tw.Dense(torch.rand(2, 1, 90, 100) < 0.5), ()),
        "of a head": (tw.Dense(torch.rand(4, 90, 100) < 0.5), ()), "rows": (tw.Dense(torch.rand(90, 1) < 0.5), ()),
        "documents": (tw.Documents(torch.arange(90).repeat(2, 1) // 30, torch.arange(100).repeat(2, 1) // 30), ()),
        "bias": (tw.Full(), (tw.Bias(torch.randn(4, 90, 1)),)), "scalar": (tw.Full(), (tw.Bias(torch.tensor(2.0)),)),
        "bias, window": (tw.Window(30, 4), (tw.Bias(torch.randn(90, 100)),)),
        "bias of a large negative": (tw.Full(), (tw.Bias(torch.full((90, 1), -1e9)),)),
    }  # fmt: skip


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("queries", [90, 1])
def test_strips_give_what_tiles_give(monkeypatch, name, queries):
    small = {"ROWS": 16, "COLUMNS": 16, "MOST_ROWS": 32, "FEW": 40, "FASTER": {torch.float64: 99.0}}
    for constant, value in small.items():
        monkeypatch.setattr(strips, constant, value)
    mask, score = masks()[name]
    if queries == 1 and any(90 in t.shape for value in (*mask.parts, *score) for t in value.captured):
        pytest.skip("it is of 90 queries")
    x = [torch.randn(2, n, h, 16, dtype=torch.float64) for n, h in ((queries, 4), (100, 2), (100, 2))]
    do = torch.randn(2, queries, 4, 16, dtype=torch.float64)
    tiled = gradients(x, do, mask, "cpu-tiled", score=score)
    monkeypatch.setattr("tilewise.cpu.tiled.forward", None)
    for one, other in zip(tiled, gradients(x, do, mask, score=score), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_nan_at_a_hidden_key_stays_hidden():
    x = [torch.randn(1, 100, 2, 16, dtype=torch.float64) for _ in range(3)]
    x[1][:, 60] = torch.nan
    mask = tw.Padding(torch.tensor([60]))
    got = gradients(x, torch.ones_like(x[0]), mask)
    assert not got[0].isnan().any()
    for one, other in zip(got, gradients(x, torch.ones_like(x[0]), mask, "cpu-tiled"), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_a_sparse_mask_is_left_to_tiles():
    q, diagonal = torch.randn(1, 1024, 1, 8), torch.eye(4, dtype=torch.bool)
    diagonal[:, [0, -1]] = True
    for blocks in (diagonal, torch.ones(4, 4, dtype=torch.bool)):
        mask = tw.Dense(blocks.repeat_interleave(256, 0).repeat_interleave(256, 1))
        x = Operands(q, q, q, mask.captured)
        p = describe(x, Recipe((mask.plain,)), (0, 0))
        assert any(strips.strips(p, x, (p.M, p.N))) == bool(blocks.all())
        torch.testing.assert_close(load("cpu").forward(p, x, None).o, reference.attention(q, q, q, mask=mask)[0])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 16), (torch.bfloat16, 16)])
def test_a_tiny_call_makes_few_calls_in_python(monkeypatch, dtype, most):
    monkeypatch.setattr(UNITS, lambda: True)
    q, k, v = (torch.randn(1, n, 4, 64, dtype=dtype) for n in (8, 64, 64))
    for _ in range(3):
        assert tw.attention(q, k, v).is_contiguous()
    made = []
    sys.setprofile(lambda frame, event, arg: made.append(frame.f_code.co_name) if event == "call" else None)
    try:
        tw.attention(q, k, v)
    finally:
        sys.setprofile(None)
    assert len(made) <= most, made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_is_repeated_until_rows_may_be_wrong(monkeypatch, dtype):
    """A NaN of a hidden key must not show."""
    monkeypatch.setattr(UNITS, lambda: True)
    x = [torch.randn(1, 160, 4, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    do = torch.randn(1, 160, 4, 64, dtype=dtype)

    def results():
        o = tw.attention(*x, mask=tw.Window(9, 0))
        return o.detach(), *torch.autograd.grad(o, x, do)

    first, *_, last = (results() for _ in range(4))
    with monkeypatch.context() as without:
        without.setattr(fused, "forward", None)
        without.setattr(fused, "backward", None)
        again = results()
    assert all(map(torch.equal, first, last))
    assert all(map(torch.equal, first, again))
    with torch.no_grad():
        x[1][0, 100:] = torch.nan
    o, *_ = results()
    torch.testing.assert_close(o[:, :100], first[0][:, :100], atol=0.02, rtol=0.02)  # by tiles
    assert o[0, 100:].isnan().all()


def test_a_mask_that_hides_rows_is_not_repeated():
    """Each call would look at them again."""
    q, k = torch.randn(1, 300, 4, 64), torch.randn(1, 260, 4, 64)
    p = describe(Operands(q, k, k, ()), Recipe((("Causal",),)), (0, 0))
    assert not fused.why_not(p)
    assert fused.repeated(p, Operands(q, k, k, ()), None) is None


def test_a_repeated_call_looks_again_where_rows_may_be_wrong():
    q, k, v = (torch.randn(1, n, 4, 16, requires_grad=True) for n in (8, 64, 64))
    for _ in range(3):
        tw.attention(q, k, v).sum().backward()
    with torch.no_grad():
        q[0, 3] = torch.nan
    o = tw.attention(q, k, v)
    assert o[0, 3].isnan().all()
    assert not o[0, 4:].isnan().any()
    (dq,) = torch.autograd.grad(o.sum(), q)
    assert dq[0, 3].isnan().all()


def test_a_repeated_call_keeps_fp32_exact():
    matmul, (q, k, v) = torch.backends.mkldnn.matmul, (torch.randn(1, 64, 2, 64, requires_grad=True) for _ in range(3))
    before = matmul.fp32_precision
    exact = [torch.autograd.grad(tw.attention(q, k, v).sum(), (q, k, v)) for _ in range(3)]
    try:
        matmul.fp32_precision = "bf16"
        found = torch.autograd.grad(tw.attention(q, k, v).sum(), (q, k, v))
    finally:
        matmul.fp32_precision = before
    for one, other in zip(exact[-1], found, strict=True):
        assert torch.equal(one, other)
