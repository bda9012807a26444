"""Tier 4 for Hopper, where only an H100 or H200 can answer: repeats bit by bit, graphs, streams, compute-sanitizer.

python -m pytest tests/hopper/test_on_hopper.py
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from graphs import captured
from hopper import racecheck

import tilewise as tw

HERE = Path(__file__).parent
CARD = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason=f"needs compute capability 9.0, an H100 or H200; here is {CARD}",
)
REPEATS = 250
SIZES = (64, 128, 256)
ORDERED = {"mask": tw.Causal(), "deterministic": True}
KINDS = {"full": {}, "causal": {"mask": tw.Causal()}, "causal, deterministic": ORDERED}
COMBINED = {"mask": tw.Causal() & tw.Window(500, 0), "score": tw.SoftCap(30.0), "dropout": 0.1, "seed": 3}
CASES = {
    **{f"{D} {kind}": (D, options) for D, (kind, options) in product(SIZES, KINDS.items())},
    "128 combined": (128, COMBINED),
    "64 fp16x3": (64, {"mask": tw.Causal(), "precision": "fp16x3"}),
    "64 bf16x6, deterministic": (64, {**ORDERED, "precision": "bf16x6"}),
    "128 fp16x3, deterministic": (128, {**ORDERED, "precision": "fp16x3"}),
    "128 bf16x6": (128, {"mask": tw.Causal(), "precision": "bf16x6"}),
    **{f"{D} eight heads a key": (D, {"mask": tw.Causal()}, 8) for D in SIZES},
    "128 eight heads a key, deterministic": (128, ORDERED, 8),
    "64 eight heads a key, fp16x3": (64, {"mask": tw.Causal(), "precision": "fp16x3"}, 8),
}
"""Head size, options, and query heads of a key head, of what is repeated."""


def operands(D, dtype=torch.bfloat16, group=2, M=1100, H=8):
    """(q, k, v) with fewer key heads, and dO. 1100 is no multiple of a tile."""
    of_keys = H // group
    x = [torch.randn(2, M, heads, D, device="cuda", dtype=dtype).requires_grad_() for heads in (H, of_keys, of_keys)]
    return x, torch.randn(2, M, H, D, device="cuda", dtype=dtype)


def step(x, do, **options):
    """Forward and backward, by name; no graph of autograd stays alive."""
    o, lse = tw.attention(*x, backend="hopper", return_lse=True, **options)
    gradients = torch.autograd.grad(o, x, do)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def differences(found, wanted):
    """The largest difference of each result that is not the same in every bit."""
    names = [name for name, t in wanted.items() if not torch.equal(found[name], t)]
    return {name: (found[name].double() - wanted[name].double()).abs().max().item() for name in names}


@on_hopper
@pytest.mark.parametrize("case", CASES)
def test_repeats_are_equal_in_every_bit(case):
    """In memory that is fresh and full of NaN each time; dq where it is promised, and else up to rounding."""
    D, options, *group = CASES[case]
    x, do = operands(D, torch.float32 if "precision" in options else torch.bfloat16, *group)
    assert torch.empty(9, device="cuda").isnan().all(), "fresh memory is not filled with NaN"
    first = step(x, do, **options)
    unwritten = {name: int(t.isfinite().logical_not().sum()) for name, t in first.items()}
    assert not any(unwritten.values()), f"entries that are not finite: {unwritten}"
    dq = first["dq"] if options.get("deterministic") else first.pop("dq")
    for n in range(REPEATS):
        again = step(x, do, **options)
        assert not differences(again, first), f"repeat {n} of {REPEATS} differs: {differences(again, first)}"
    error, bound = (again["dq"] - dq).abs().max().item(), 0.02 * dq.abs().max().item()
    assert error <= bound, f"dq of the last repeat differs by {error}, allowed is {bound}"


@torch.no_grad()
def forward(x, _, **options):
    """The forward alone, as `step` gives it."""
    o, lse = tw.attention(*x, backend="hopper", return_lse=True, **options)
    return {"o": o, "lse": lse}


@on_hopper
@pytest.mark.parametrize("call", [forward, step])
@pytest.mark.parametrize("D", SIZES)
def test_replays_into_poisoned_memory_equal_the_call(D, call):
    x, do = operands(D)
    wanted = call(x, do, **ORDERED)
    graph, results = captured(lambda: call(x, do, **ORDERED))
    for n in range(20):
        for t in results.values():
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert not differences(results, wanted), f"replay {n} differs from the call: {differences(results, wanted)}"


def milliseconds(function, rounds=20):
    """A call's time among many, one behind the other."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


@on_hopper
def test_a_replay_is_no_slower_than_the_call(monkeypatch):
    """Both are the kernel's time, as the call is long enough to hide Python; 10 percent are left to the clocks."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x, _ = operands(128, M=4100, H=12)
    graph, _ = captured(lambda: forward(x, None, mask=tw.Causal()))
    replays, calls = [], []
    for _ in range(5):
        replays.append(milliseconds(graph.replay))
        calls.append(milliseconds(lambda: forward(x, None, mask=tw.Causal())))
    assert min(replays) <= 1.1 * min(calls), f"a replay takes {min(replays)} ms, the call {min(calls)} ms"


@on_hopper
def test_two_streams_at_once_give_what_each_gives_alone():
    sets = [operands(D, M=4100, H=12) for D in (64, 128)]
    alone = [step(x, do, **ORDERED) for x, do in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for n in range(50):
        together = []
        for stream, (x, do) in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                together.append(step(x, do, **ORDERED))
        torch.cuda.synchronize()
        wrong = [differences(found, wanted) for found, wanted in zip(together, alone, strict=True)]
        assert not any(wrong), f"round {n}: head size 64 differs by {wrong[0]}, 128 by {wrong[1]}"


def watched(tool, *options):
    """What compute-sanitizer says of sanitized.py. Without PyTorch's cache a tensor's end is the end of its memory."""
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not on the PATH")
    path = os.pathsep.join([str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, *options, "--print-limit", "0", sys.executable, str(HERE / "sanitized.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support the device here")
    assert done.returncode == 0, f"exit status {done.returncode}: {said[-4000:]}"
    assert "ran all" in said, said[-4000:]
    return said


@on_hopper
def test_memcheck_finds_nothing():
    said = watched("memcheck")
    errors = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", said)]
    assert errors, f"no summary: {said[-4000:]}"
    assert not any(errors), said[:8000]


@on_hopper
def test_racecheck_finds_nothing_that_it_does_not_find_in_the_control():
    """Every hand-over between warps is by mbarrier; what racecheck reports of a correct one is no report of ours."""
    # the manual says that the compiler's own count of mbarriers may be too low; these kernels have up to 21. Two files
    # are called kernel.py, so paths are needed
    said = watched("racecheck", "--num-cuda-barriers", "64", "--strip-paths", "no")
    assert "overflow of tracked" not in said, f"more mbarriers than racecheck was told of: {said[-4000:]}"
    reports = racecheck.read(said)
    of_control, of_broken = (racecheck.kinds(reports, kernel) for kernel in (racecheck.CONTROL, racecheck.BROKEN))
    print(f"racecheck reports of the control: {sorted(of_control)}; without waits: {sorted(of_broken)}")
    print(*sorted(set(map(str, reports))), sep="\n")
    seen = {racecheck.FROM_A_WARP, racecheck.FROM_A_GROUP}
    assert of_broken, "without waits racecheck sees nothing: its silence about ours means nothing"
    sees = of_control | of_broken
    assert seen <= sees, f"racecheck sees {sees} alone: its silence about ours means nothing"
    assert racecheck.ELSEWHERE not in of_control, f"the control has reports of no known kind: {of_control}"
    left = sorted({str(report) for report in racecheck.unexcused(reports)})
    assert not left, "\n".join([f"of the control it reports {sorted(of_control)}; of ours besides:", *left])
