"""Small calls, forward and backward, for compute-sanitizer to watch, and the control: see test_on_hopper.py."""

import control
import torch

import tilewise as tw
from tilewise.hopper import plan

NEAR = tw.Causal() & tw.Window(70, 0)
CALLS = (
    (64, {"mask": tw.Causal()}),
    (64, {"mask": NEAR, "deterministic": True}),
    (128, {"mask": NEAR}),
    (128, {"mask": tw.Causal(), "deterministic": True}),
    (256, {"mask": tw.Causal()}),
    (256, {"mask": NEAR, "deterministic": True}),
    (64, {"mask": tw.Causal(), "precision": "fp16x3"}),
    (128, {"mask": tw.Causal(), "precision": "fp16x3", "deterministic": True}),
    (64, {"mask": tw.Causal(), "precision": "bf16x6", "deterministic": True}),
    (128, {"mask": tw.Causal(), "precision": "bf16x6"}),
)
"""Head sizes and options; with a precision, fp32. Most are compiled for other tests, too."""
plan.SHORT_LOOP = 400  # of two heads: four that share keys are then in two loops


def watch(D, options):
    """One call, whose results come back finite. Nothing else runs on the GPU: torch's kernels would be watched too."""
    dtype = torch.float32 if "precision" in options else torch.bfloat16
    x = [torch.randn(2, 200, heads, D).to("cuda", dtype).requires_grad_() for heads in (4, 1, 1)]
    o = tw.attention(*x, backend="hopper", **options)
    found = (o, *torch.autograd.grad(o, x, torch.randn(o.shape).to("cuda", dtype)))
    assert all(t.detach().cpu().isfinite().all() for t in found), "not finite"
    print("ran", D, options, flush=True)


def watch_control():
    """The kernel that waits sums up right; of the one that does not, nothing can be said."""
    sums, counter = torch.zeros(128, dtype=torch.int64).cuda(), torch.zeros(1, dtype=torch.int32).cuda()
    control.send_dq[(1,)](sums, counter, WAITS=True, num_warps=4)
    rounds = control.ROUNDS.value
    assert sums.tolist() == [rounds * n + rounds * (rounds - 1) // 2 for n in range(128)], sums.tolist()
    control.send_dq[(1,)](sums, counter, WAITS=False, num_warps=4)
    torch.cuda.synchronize()
    print("ran the control", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    watch_control()
    for D, options in CALLS:
        watch(D, options)
    print("ran all", flush=True)
