"""The gradient of a sink that learns, on a GPU: the kernel against torch's operations in fp64, and what it costs."""

import pytest
import torch
from graphs import captured

import tilewise as tw

pytest.importorskip("triton")
from tilewise.host.sink import CONSTANTS
from tilewise.merge.sink import sink_gradient
from tilewise.tile.sink import attention_backward_sink

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {
    "hopper bf16": ("hopper", BF16, {}), "hopper fp32": ("hopper", FP32, {"precision": "fp16x3"}),
    "triton bf16": ("triton", BF16, {}), "triton fp32": ("triton", FP32, {}),
}  # fmt: skip
SIZES = {"one tile": (300, 49, 8), "few rows": (1, 17, 8), "a batch": (3, 1000, 16), "long": (1, 20000, 64)}
"""B, M, H."""
LENGTHS = {"one": (700,), "many": (300, 0, 129, 64, 1, 5000), "of two rows": (2,) * 3000}


def operands(kind, rows, H, D=64, H_k=None, sink=FP32):
    """q, k, v and a sink that require gradients, the gradients of o and lse, and options."""
    backend, dtype, options = KINDS[kind]
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need compute capability 9.0")
    x = [torch.randn(*rows, heads, D, device="cuda", dtype=dtype) for heads in (H, H_k or H, H_k or H)]
    *batch, M = rows
    leaves = [t.requires_grad_() for t in (*x, torch.randn(H, device="cuda").to(sink))]
    given = torch.randn(*rows, H, D, device="cuda", dtype=dtype), torch.randn(*batch, H, M, device="cuda")
    return leaves, given, {"mask": tw.Causal() & tw.Window(128, 0), "backend": backend, **options}


def compare(leaves, given, options):
    """Compare the sink's gradient with torch's operations on this call's o and lse, twice: it repeats bit for bit."""
    do, dlse = given
    found = []
    for _ in range(3):  # the third time by addresses alone, where the backward is repeated
        o, lse = tw.attention(*leaves[:3], sink=leaves[3], return_lse=True, **options)
        hidden = dlse.masked_fill(lse.isinf(), 0.0)
        found.append(torch.autograd.grad((o, lse), leaves, (do, hidden))[3])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    delta = (do.double() * o.detach().double()).sum(-1).transpose(-1, -2) - hidden
    true = sink_gradient(leaves[3].detach().double(), lse.detach().double(), delta)
    size = sink_gradient(leaves[3].detach().double(), lse.detach().double(), -delta.abs())
    error = (found[0].double() - true).abs()
    assert (error <= 1e-5 * size + torch.finfo(leaves[3].dtype).eps * true.abs()).all(), f"off by {error.max():.2g}"


@pytest.mark.parametrize("sink", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_batch(size, kind, sink):
    if sink == BF16 and KINDS[kind][1] == FP32:
        pytest.skip("a sink is in fp32 or q's type")
    torch.manual_seed(0)
    B, M, H = SIZES[size]
    leaves, given, options = operands(kind, (B, M), H, sink=sink)
    compare(leaves, given, options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(lengths, kind):
    """With rows behind the last sequence."""
    torch.manual_seed(0)
    cu = torch.tensor((0, *LENGTHS[lengths]), device="cuda").cumsum(0).to(torch.int32)
    leaves, given, options = operands(kind, (sum(LENGTHS[lengths]) + 77,), 8, H_k=2)
    longest = max(LENGTHS[lengths])
    compare(leaves, given, {**options, "layout": tw.Varlen(cu, cu, longest, longest)})


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_backward_without_a_gradient_of_lse_repeats(backend):
    """By addresses alone, on memory that was used before."""
    torch.manual_seed(0)
    leaves, (do, _), options = operands(f"{backend} bf16", (2, 1000), 16)
    found = [torch.autograd.grad(tw.attention(*leaves[:3], sink=leaves[3], **options), leaves, do)[3] for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("B", "M", "H"), [(2, 4096, 64), (32, 4096, 64), (256, 4096, 8)], ids=str)
def test_what_it_costs(B, M, H, monkeypatch):
    """Printed, beside torch's operations: the GPU's time alone. A million rows of few heads may take longer."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    sink, grad, (lse, delta) = (
        torch.randn(H, device="cuda"),
        torch.empty(H, device="cuda"),
        torch.randn(2, B, H, M).cuda(),
    )
    given = grad, sink, 1, lse, delta, None, 0, B, M, H, B * M, M
    calls = (
        lambda: attention_backward_sink[(H,)](*given, BLOCK=1, **CONSTANTS),
        lambda: sink_gradient(sink, lse, delta),
    )
    ours, torchs = (milliseconds(captured(call)[0].replay) for call in calls)
    print(f"{B} x {M} rows of {H} heads: {1000 * ours:.1f} us, torch's operations {1000 * torchs:.1f} us")
    assert ours <= torchs or H == 8


def milliseconds(function, repeats=50):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats
