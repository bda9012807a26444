"""8-bit products on a GPU: codes as plain torch's, results as the CPU's, gradients, and a CUDA graph."""

import pytest
import torch

import tilewise as tw
from tilewise import quantize, reference
from tilewise.backend import select
from tilewise.check import check_arguments, describe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
bf16 = torch.bfloat16


def drawn(M, N, H, H_k, D, seed=0):
    """Operands with means in K and V, on the CPU."""
    g = torch.Generator().manual_seed(seed)

    def draw(n, h):
        return torch.randn(2, n, h, D, generator=g) + torch.randn(D, generator=g)

    return draw(M, H).to(bf16), draw(N, H_k).to(bf16), draw(N, H_k).to(bf16)


def refused(q, k, v, precision, **options):
    """Skip where no kernel on this GPU takes a call."""
    if tw.explain(q, k, v, precision=precision, **options).backend is None:
        pytest.skip(f"no kernel for {precision} here")


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_codes_are_those_of_plain_torch(precision, D):
    operands = [t.cuda() for t in drawn(300, 700, 4, 2, D)]
    refused(*operands, precision)
    x, recipe, longest = check_arguments(
        *operands, tw.Full(), (), None, None, 0.0, None, precision, False, None
    )  # fmt: skip
    p = describe(x, recipe, longest)
    want, got = quantize.quantize(p, x), select(p).codes(p, x)
    for field, a, b in zip(quantize.Codes._fields, want, got, strict=True):
        if a is not None and field != "q_shift":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), field


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal(), tw.Window(100, 0)], ids=lambda mask: type(mask).__name__)
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_errors_are_those_of_the_cpu(precision, mask, D):
    """The rule of approximations: 1.1 times the CPU's error, and two units in the last place of the largest entry."""
    q, k, v = drawn(300, 700, 4, 2, D)
    refused(q.cuda(), k.cuda(), v.cuda(), precision, mask=mask)
    do = torch.randn(2, 300, 4, D, generator=torch.Generator().manual_seed(9)).to(bf16)

    def results(device):
        leaves = [t.to(device).detach().requires_grad_() for t in (q, k, v)]
        o, lse = tw.attention(*leaves, mask=mask, precision=precision, return_lse=True)
        return [t.detach().cpu() for t in (o, lse, *torch.autograd.grad(o, leaves, do.to(device)))]

    wide = [t.double() for t in (q, k, v)]
    true = [*reference.attention(*wide, mask=mask), *reference.gradients(*wide, do.double(), mask=mask)[:3]]
    for name, ours, theirs, t in zip(
        ("o", "lse", "dq", "dk", "dv"), results("cuda"), results("cpu"), true, strict=True
    ):
        units = 2 * torch.finfo(bf16).eps * t.abs().max().item()
        found, allowed = ((x.double() - t).square().mean().sqrt().item() for x in (ours, theirs))
        assert found <= 1.1 * allowed + units, name


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_graph_replays_with_other_numbers(precision):
    q, k, v = (t.cuda() for t in drawn(300, 700, 4, 2, 128))
    refused(q, k, v, precision)
    tw.attention(q, k, v, precision=precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tw.attention(q, k, v, precision=precision)
    for t, other in zip((q, k, v), drawn(300, 700, 4, 2, 128, seed=1), strict=True):
        t.copy_(other)
    graph.replay()
    assert torch.equal(o, tw.attention(q, k, v, precision=precision))
