"""A finite bias is finite: rows filled with what additive masks hold, as plain torch computes them."""

import pytest
import torch

import tilewise as tw

FILLS = (-1e9, -1e20, -1e38, *(torch.finfo(dtype).min for dtype in (torch.bfloat16, torch.float32)))
BACKENDS = ("cpu", "triton")


def operands(*shape):
    torch.manual_seed(0)
    return tuple(torch.randn(1, 20, 2, 16).requires_grad_() for _ in range(3))


def plain(q, k, v, bias):
    """Attention written out in fp32."""
    S = torch.einsum("bmhd,bnhd->bhmn", q, k) / 4 + bias
    return torch.einsum("bhmn,bnhd->bmhd", torch.softmax(S, -1), v), torch.logsumexp(S, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", FILLS)
def test_a_filled_row_is_plain_torchs(backend, number):
    q, k, v = operands()
    bias = torch.randn(20, 20)
    bias[:2] = number
    bias[2:4, :15] = number
    leaves = (q, k, v, bias.requires_grad_())
    results = []
    for o, lse in (tw.attention(q, k, v, score=tw.Bias(bias), backend=backend, return_lse=True), plain(*leaves)):
        results.append((o, lse, *torch.autograd.grad(o.sin().sum() + lse.clamp(-9).sum(), leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert results[0][1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_largest_positive_biases_choose_their_keys(backend):
    q, k, v = operands()
    bias = torch.zeros(20, 20)
    bias[0, 3] = bias[1, 3] = bias[1, 7] = torch.finfo(torch.float32).max
    o, lse = tw.attention(q, k, v, score=tw.Bias(bias), backend=backend, return_lse=True)
    torch.testing.assert_close(o[:, 0], v[:, 3])
    torch.testing.assert_close(o[:, 1], (v[:, 3] + v[:, 7]) / 2)
    assert lse.isfinite().all()


def test_sink_and_merge_stay_finite_beside_filled_rows():
    q, k, v = operands()
    bias, sink = torch.full((20, 20), torch.finfo(torch.float32).min), torch.zeros(2, requires_grad=True)
    o = tw.attention(q, k, v, score=tw.Bias(bias), sink=sink)
    found = torch.autograd.grad(o.sum(), (q, k, v, sink))
    assert all(not t.any() for t in (o, *found)), "the sink takes all of P"
    half = tw.attention(q, k, v, score=tw.Bias(bias), return_lse=True)
    o, lse = tw.merge([half, half])
    torch.testing.assert_close(o, v.mean(1, keepdim=True).expand_as(o))
    assert all(t.isfinite().all() for t in (lse, *torch.autograd.grad(o.sum() + lse.sum() * 1e-38, (q, k, v))))
