"""Heads whose score matrix is one tile, on a GPU: o, lse and every gradient against the reference in fp64."""

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
SIZES = {
    "Swin": (300, 49, 49, 8, 8, 32), "64 tokens": (5, 64, 64, 4, 2, 64), "other keys": (3, 17, 60, 4, 4, 40),
    "32 tokens": (9, 32, 32, 4, 4, 128), "large heads": (2, 50, 50, 2, 1, 128), "one": (1, 1, 1, 1, 1, 16),
}  # fmt: skip
"""B, M, N, H, H_k, D."""
OFF = 2e-2
"""Of a tensor's largest entry."""
NAMES = ("o", "lse", "dq", "dk", "dv", "dsink", "dbias")


def options(variant, B, H, M, N):
    """Options of a call, and its bias and sink."""
    bias = (0.5 * torch.randn(H, M, N, device="cuda")).requires_grad_()
    own = (0.5 * torch.randn(B, H, M, N, device="cuda")).requires_grad_()
    sink = torch.randn(H, device="cuda", requires_grad=True)
    made = {
        "plain": ({}, None, None),
        "causal": ({"mask": tw.Causal()}, None, None),
        "bias": ({}, bias, None),
        "bias of batch entries": ({}, own, None),
        "all": ({"mask": tw.Causal() & tw.Window(20, 0), "dropout": 0.2}, bias, sink),
    }
    return made[variant]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["plain", "causal", "bias", "bias of batch entries", "all"])
@pytest.mark.parametrize("size", SIZES)
def test_every_result_is_right_and_repeats(size, variant, dtype):
    torch.manual_seed(0)
    B, M, N, H, H_k, D = SIZES[size]
    q, k, v, do = (torch.randn(B, n, h, D, device="cuda").to(dtype) for n, h in ((M, H), (N, H_k), (N, H_k), (M, H)))
    dlse = torch.randn(B, H, M, device="cuda")
    given, bias, sink = options(variant, B, H, M, N)
    scores = (tw.Bias(bias),) if bias is not None else ()
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), *(t for t in (sink, bias) if t is not None)]

    def call():
        more = {"sink": sink} if sink is not None else {}
        o, lse = tw.attention(q, k, v, score=scores, seed=5, return_lse=True, backend="triton", **given, **more)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse.masked_fill(lse.isinf(), 0.0)))

    assert "one tile" in str(tw.explain(q, k, v, score=scores, backend="triton", **given))
    first, second = call(), call()
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y), "the same call gave other bits"
    if "dropout" in given:  # the CPU draws the same bits
        x = [t.detach().cpu().double().requires_grad_() for t in leaves]
        more = {"sink": x[3], "score": tw.Bias(x[4])}
        o, lse = tw.attention(*x[:3], seed=5, return_lse=True, **given, **more)
        grads = torch.autograd.grad((o, lse), x, (do.cpu().double(), dlse.cpu().double().masked_fill(lse.isinf(), 0.0)))
        true = [t.cuda() for t in (o, lse, *grads)]
    else:
        wide = [t.detach().double() for t in (q, k, v)]
        wider = {**given, "score": tuple(tw.Bias(bias.detach().double()) for _ in scores)}
        o, lse = reference.attention(*wide, **wider)
        masked = dlse.double().masked_fill(lse.isinf(), 0.0)
        dq, dk, dv, dextra, _ = reference.gradients(*wide, do.double(), masked, **wider)
        true = [o, lse, dq, dk, dv, *(dextra[: len(scores)])]
    names = [*NAMES[:5], *("dsink",) * (sink is not None), *("dbias",) * (bias is not None)]
    for name, x, t in zip(names, first, true, strict=True):
        seen = t.isfinite()
        error = (x.double() - t)[seen].abs().max() / t[seen].abs().max().clamp(min=1e-3)
        assert error <= OFF, f"{name} is off by {float(error):.2g} of its largest entry"
