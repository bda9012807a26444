"""out_dtype=torch.float32: o, dq, dk and dv of 16-bit inputs as they were summed, on every back end that runs here."""

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference

BACKENDS = ("cpu", "triton")
CALLS = {
    "causal": {"mask": tw.Causal()},
    "a window, a cap": {"mask": tw.Window(9, 4), "score": tw.SoftCap(3.0)},
    "dropout": {"dropout": 0.25, "seed": 3},
}


def operands(dtype, D=24, D_v=40):
    torch.manual_seed(1)
    shapes = (2, 45, 4, D), (2, 45, 2, D), (2, 45, 2, D_v)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def needs(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_call_before_they_were_rounded(name, dtype, backend):
    needs(backend)
    x, options = operands(dtype), CALLS[name] | {"backend": backend}
    o, lse = tw.attention(*x, return_lse=True, out_dtype=torch.float32, **options)
    rounded, same = tw.attention(*x, return_lse=True, **options)
    assert o.dtype == torch.float32
    assert torch.equal(o.to(dtype), rounded)
    assert torch.equal(lse, same)
    do = torch.randn_like(rounded)
    delta = (do.float() * o).sum(-1).transpose(1, 2)
    wide = tw.attention_backward(do, *x, o, lse, delta=delta, out_dtype=torch.float32, **options)
    narrow = tw.attention_backward(do, *x, rounded, lse, delta=delta, **options)
    for mine, theirs in zip(wide, narrow, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine.to(dtype), theirs)
        assert not torch.equal(mine, theirs.float()), "nothing was kept"


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_gives_gradients_in_the_inputs_types(backend):
    needs(backend)
    x = [t.requires_grad_() for t in operands(torch.bfloat16)]
    o, lse = tw.attention(*x, mask=tw.Causal(), return_lse=True, out_dtype=torch.float32, backend=backend)
    do, dlse = torch.randn_like(o).bfloat16(), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), x, (do.float(), dlse))
    true = reference.gradients(*(t.detach().double() for t in x), do.double(), dlse.double(), mask=tw.Causal())
    for mine, exact in zip(found, true[:3], strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), exact, atol=2e-2 * float(exact.abs().max()), rtol=0)


def test_the_operators_agree_and_compile_without_a_break():
    x = [t.requires_grad_() for t in operands(torch.bfloat16)]

    def call(q, k, v):
        return tw.attention(q, k, v, mask=tw.Causal(), out_dtype=torch.float32)

    o, compiled = call(*x), torch.compile(call, backend="aot_eager", fullgraph=True)(*x)
    assert torch.equal(o, compiled)
    assert all(map(torch.equal, torch.autograd.grad(o.sum(), x), torch.autograd.grad(compiled.sum(), x)))
    meta = [t.detach().to("meta") for t in x]
    o, lse = tw.attention(*meta, return_lse=True, out_dtype=torch.float32)
    assert o.dtype == torch.float32
    grads = tw.attention_backward(o, *meta, o, lse, out_dtype=torch.float32)
    assert [g.dtype for g in grads] == [torch.float32] * 3


def test_packed_operands_have_packed_gradients_in_the_inputs_type():
    qkv = torch.randn(2, 30, 3, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    o = tw.attention_qkvpacked(qkv, mask=tw.Causal(), out_dtype=torch.float32)
    (dqkv,) = torch.autograd.grad(o.sum(), qkv)
    assert o.dtype == torch.float32
    assert dqkv.dtype == torch.bfloat16


def test_warm_compiles_the_kernels_of_such_a_call():
    pytest.importorskip("triton", reason="Triton is not installed")
    q = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    names = [kernel.name for kernel in tw.warm(q, q, q, out_dtype=torch.float32, device="sm_90").kernels]
    assert sorted(names) == ["attention_backward_single", "attention_forward"]


def test_q_s_own_type_is_the_default():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = operands(dtype)
        assert tw.attention(*x, out_dtype=dtype).dtype == dtype


def test_who_takes_it_on_a_gpu_and_what_explain_says():
    pytest.importorskip("triton", reason="Triton is not installed")
    for chip, backend in (("sm_90", "hopper"), ("sm_80", "triton")):
        found = tw.explain(*operands(torch.bfloat16, 64, 64), out_dtype=torch.float32, device=chip)
        assert found.backend == backend
    narrow = tw.explain(*operands(torch.bfloat16, 16, 16), out_dtype=torch.float32, device="sm_90")
    assert any("16 and 32" in reason for reason in narrow.refusals["triton"])


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32, torch.float64), (torch.bfloat16, torch.float16), (torch.float16, "float32")],
)
def test_another_type_is_refused_by_name(dtype, out_dtype):
    with pytest.raises(ValueError, match="out_dtype must be None, q's type"):
        tw.attention(*operands(dtype), out_dtype=out_dtype)
