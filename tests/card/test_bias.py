"""Rows that a finite bias fills, on a GPU: o, lse and every gradient against the reference in fp64."""

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
FILLS = (*(torch.finfo(dtype).min for dtype in (fp16, bf16, fp32)), -1e30)
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias")


def results(call, number, dtype, M, N, D, mask):
    """What `call` gives and the reference in fp64, where one number fills 70 rows of the bias, and more in part."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, S, H, D, device="cuda").to(dtype) for S, H in ((M, 4), (N, 2), (N, 2), (M, 4)))
    bias, dlse = torch.randn(4, M, N, device="cuda"), torch.randn(2, 4, M, device="cuda")
    bias[:, :70] = number
    bias[:, 100:120, : N // 2] = number
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    o, lse = call(*leaves[:3], mask=mask, score=tw.Bias(bias))
    got = (o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse)))
    q, k, v, bias = (t.detach().double() for t in leaves)
    given = {"mask": mask, "score": (tw.Bias(bias),)}
    true = reference.attention(q, k, v, **given)
    dq, dk, dv, (dbias,), _ = reference.gradients(q, k, v, do.double(), dlse.double(), **given)
    return got, (*true, dq, dk, dv, dbias)


@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("backend", "dtype"), [("hopper", bf16), ("hopper", fp16), ("triton", bf16), ("triton", fp32)])
def test_rows_filled_with_a_finite_bias_attend_evenly(backend, dtype, D, mask):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need sm_90")

    def call(*operands, **given):
        return tw.attention(*operands, **given, backend=backend, return_lse=True)

    for number in FILLS:
        got, true = results(call, number, dtype, 300, 333, D, mask)
        for name, x, t in zip(NAMES, got, true, strict=True):
            assert x.isfinite().all(), f"{name} with a bias of {number}"
            # next to -65504 fp32 rounds the logits themselves, by 2^-9
            allowed = 2e-2 if dtype != fp32 else 1e-2 if number == FILLS[0] else 2e-5
            error = (x.double() - t).abs().max() / t.abs().max()
            assert error <= allowed, f"{name} is off by {error:.2g} of its largest entry with a bias of {number}"


@pytest.mark.parametrize(("backend", "dtype"), [("hopper", bf16), ("triton", fp32)])
@pytest.mark.parametrize("number", [-1e6, -1e9, 3e38])
def test_beside_other_large_numbers_p_sums_to_one(backend, dtype, number):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need sm_90")
    q, k, v = (torch.randn(1, 256, 2, 64, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    bias = torch.full((256, 256), number, device="cuda")
    o = tw.attention(q, k, v, score=tw.Bias(bias), backend=backend)
    (dv,) = torch.autograd.grad(o.float().sum(), v)
    assert abs(dv.double().sum() / o.numel() - 1.0) < 1e-2, "the sum of dV is that of P, of which each row has 1"
    assert o.isfinite().all()
