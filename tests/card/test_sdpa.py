"""PyTorch's own attention functions on tilewise, on a GPU: who runs, what comes out, and what PyTorch gets back."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise as tw
from tilewise.compat import sdpa, torch_flash

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
GPU_BACK_ENDS = {"hopper", "triton"}
N = 640
BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}
"""Of the largest entry: enough to tell one mask or scale from another; conformance tests hold the accuracy."""
CASES = {
    "plain": lambda: {},
    "causal": lambda: {"is_causal": True},
    "grouped": lambda: {"is_causal": True, "enable_gqa": True},
    "bools": lambda: {"attn_mask": torch.rand(1, 1, N, N, device="cuda") < 0.7},
    "padding": lambda: {"attn_mask": (torch.arange(N, device="cuda") < 500)[None, None, None]},
    "numbers": lambda: {"attn_mask": torch.randn(4, N, N, device="cuda")},
}


def draw(heads, dtype, length=N):
    return torch.randn(2, heads, length, 64, device="cuda").to(dtype).requires_grad_()


def results(x, options):
    out = scaled_dot_product_attention(*x, **options)
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, x, torch.randn(out.shape, device="cuda").to(out.dtype))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # PyTorch's, in a thread of autograd
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_pytorch_computes(case, dtype):
    options = CASES[case]()
    x = [draw(heads, dtype) for heads in ((4, 2, 2) if "enable_gqa" in options else (4, 4, 4))]
    if case == "numbers":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = results(x, options)
    with tw.count_calls() as calls, sdpa.use(always=True):
        mine = results(x, options)
    assert calls.ran.keys() <= GPU_BACK_ENDS
    assert calls.ran.total() == 1
    for got, want in zip(mine, theirs, strict=True):
        error, bound = (got - want).abs().max().item(), BOUNDS[dtype] * want.abs().max().item()
        assert error <= bound, f"off by {error}, allowed {bound}"


def test_short_calls_and_fp64_are_fell_back():
    with tw.count_calls() as calls, sdpa.use():
        for dtype, length in ((torch.bfloat16, 32), (torch.float64, 512)):
            scaled_dot_product_attention(*[draw(4, dtype, length)] * 3)
    assert not calls.ran
    assert calls.fell_back.total() == 2


def test_a_capture_holds_tilewises_kernels():
    x = [draw(4, torch.bfloat16).detach() for _ in range(3)]
    with sdpa.use(always=True):
        expected = scaled_dot_product_attention(*x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = scaled_dot_product_attention(*x)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


def test_an_encoder_in_evaluation_counts_once_a_layer():
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, device="cuda", dtype=torch.bfloat16)
    model = nn.TransformerEncoder(layer, 3).eval()
    with torch.inference_mode(), tw.count_calls() as calls, sdpa.use(always=True):
        model(torch.randn(2, N, 256, device="cuda", dtype=torch.bfloat16))
    assert calls.total() == 3


def test_varlen_attn_runs_here_and_hands_back_there():
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")
    ends = torch.tensor([0, 300, N], device="cuda", dtype=torch.int32)
    x = [torch.randn(N, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def call():
        out = varlen.varlen_attn(*x, ends, ends, N - 300, N - 300, window_size=(-1, 0))
        return out, *torch.autograd.grad(out.float().square().sum(), x)

    fell_back = {}
    if "seqused_k" in inspect.signature(varlen.varlen_attn).parameters:  # later than PyTorch 2.11
        fell_back = {"seqused_k": ends.diff()}
    expected = call()
    torch_flash.register("tilewise-test")
    torch.nn.attention.activate_flash_attention_impl("tilewise-test")
    try:
        with tw.count_calls() as calls:
            found = call()
            if fell_back:
                with torch.no_grad():
                    varlen.varlen_attn(*x, ends, ends, N - 300, N - 300, **fell_back)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert calls.ran.total() == 1
    assert calls.fell_back == dict.fromkeys(fell_back, 1)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), want.float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_delta_stands_for_o_and_the_gradient_of_lse(backend, dtype):
    x = [draw(4, dtype).detach().transpose(1, 2) for _ in range(3)]
    options = {"mask": tw.Causal(), "backend": backend}
    if tw.explain(*x, **options).refusals[backend]:
        pytest.skip(f"{backend} does not run here")
    o, lse = tw.attention(*x, return_lse=True, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    delta = (do.float() * o.float()).sum(-1).transpose(1, 2) - dlse
    expected = tw.attention_backward(do, *x, o, lse, dlse=dlse, **options)
    found = tw.attention_backward(do, *x, o, lse, delta=delta, **options)
    for got, want in zip(found, expected, strict=True):
        error, bound = (got - want).abs().max().item(), 0.01 * want.abs().max().item()
        assert error <= bound, f"{backend} is off by {error}, allowed {bound}"
