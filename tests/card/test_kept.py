"""Kept launches on a GPU: they compute bit by bit what new ones do, wherever the tensors lie. And what a call costs."""

from functools import partial

import pytest
import torch

import tilewise as tw
from studies.bench.measure import host_cost
from tilewise.host.replay import Replay

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches need a GPU")

SHAPES = {
    "contiguous": lambda t: t[: 1 << 19].view(2, 512, 4, 128),
    "apart": lambda t: t[: 1 << 20].view(2, 512, 8, 128)[:, :, ::2],
    "heads first": lambda t: t[: 1 << 19].view(2, 4, 512, 128).transpose(1, 2),
    "longer": lambda t: t[: 1 << 19].view(1, 1024, 4, 128),
    "narrow": lambda t: t[: 1 << 19].view(2, 1024, 4, 64),
}
"""Views of one memory, all from its first address on."""
OPTIONS = {
    "full": {},
    "causal": {"mask": tw.Causal()},
    "capped": {"score": tw.SoftCap(20.0)},
    "dropout": {"dropout": 0.25, "seed": 7},
}


def steps(memory, backend):
    """Forward and backward of every view with every option; dq is in order, so that all bits repeat."""
    found = {}
    for (shape, view), (name, options) in ((a, b) for a in SHAPES.items() for b in OPTIONS.items()):
        q, k, v, do = map(view, memory)
        x = [t.detach().requires_grad_() for t in (q, k, v)]
        o = tw.attention(*x, backend=backend, deterministic=True, **options)
        found[shape, name] = [o.detach(), *torch.autograd.grad(o, x, do)]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_kept_launches_give_the_bits_of_new_ones(backend, dtype, monkeypatch):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need compute capability 9.0")
    if backend == "hopper" and dtype == torch.float32:
        for name in ("capped", "dropout"):
            monkeypatch.delitem(OPTIONS, name)  # its fp32 kernels know neither
    memories = [torch.randn(4, 1 << 20, device="cuda", dtype=dtype) for _ in range(2)]
    steps(memories[0], backend)  # it compiles
    side = torch.cuda.Stream()
    served, run = [], Replay.run
    monkeypatch.setattr(Replay, "run", lambda *given: served.append(run(*given)) or served[-1])
    found = [steps(memory, backend) for memory in memories]
    with torch.cuda.stream(side):
        found.append(steps(memories[1], backend))
    torch.cuda.synchronize()
    monkeypatch.setattr(Replay, "run", lambda *_: False)
    wanted = [steps(memory, backend) for memory in memories]
    for kept, new in zip(found, (*wanted, wanted[1]), strict=True):
        for name in new:
            assert all(map(torch.equal, kept[name], new[name])), name
    assert all(served)


@pytest.mark.parametrize(("pass_", "most"), [("without gradients", 1.43), ("with gradients", 1.64), ("backward", 1.64)])
def test_the_host_time_cost_of_a_short_call(pass_, most):
    """At most these times the time of SDPA on the same machine."""
    x = [torch.randn(1, 128, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    x = [t.requires_grad_(pass_ != "without gradients") for t in x]
    heads = [t.transpose(1, 2) for t in x]

    def ours():
        return tw.attention(*x, mask=tw.Causal())

    def sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)

    calls = [ours, sdpa]
    if pass_ == "backward":
        outs = [call() for call in calls]
        calls = [partial(torch.autograd.grad, o, x, torch.randn_like(o), retain_graph=True) for o in outs]
    rounds = [[1e6 * host_cost(call, x[0].device) for call in calls] for _ in range(3)]
    found = [min(times) for times in zip(*rounds, strict=True)]
    print(f"{pass_}: {found[0]:.1f} and, of SDPA, {found[1]:.1f} microseconds")
    assert found[0] <= most * found[1]
