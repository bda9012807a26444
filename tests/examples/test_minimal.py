"""The stages of examples/minimal: as accurate as plain torch, short, and each runs alone."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # stages 6 to 8 are written in it

MINIMAL = Path(__file__).parents[2] / "examples" / "minimal"
STAGES = (
    "naive", "online_softmax", "flash1", "flash2", "backward", "triton_forward", "triton_backward", "hopper_forward",
)  # fmt: skip
FORWARDS = {"naive": {}, "online_softmax": {"B_c": 16}, "flash1": {"B_r": 32, "B_c": 16}, "flash2": {"B_r": 16}}
LENGTHS = ((1, 1), (77, 77), (130, 130), (1, 77), (77, 130), (130, 77))
ORDERS = 8
"""In which plain torch sums."""
IN_TRITON = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="no GPU and no interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

sys.path.insert(0, str(MINIMAL))  # a stage is imported as it is when it runs alone


# The rule


def plain(Q, K, V, dO, causal):
    """O, lse, dQ, dK, dV by torch alone, in the inputs' own type. A row without keys gives 0 and -inf."""
    leaves = [t.detach().clone().requires_grad_() for t in (Q, K, V)]
    (M, d), N = Q.shape[1:], K.shape[1]
    S = leaves[0] @ leaves[1].mT * d**-0.5
    if causal:
        S = S.masked_fill(~torch.ones(M, N, device=Q.device).tril(N - M).bool(), -torch.inf)
    blind = S.isneginf().all(-1, keepdim=True)
    P = torch.softmax(S.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    O = P @ leaves[2]
    lse = torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), -1)
    return O.detach(), lse.detach(), *torch.autograd.grad(O, leaves, dO)


def plain_from_lse(Q, K, V, dO, causal):
    """The same, with the gradients by the paper's formulas: P comes back from lse, whose rounding counts too."""
    O, lse, *_ = plain(Q, K, V, dO, causal)
    (M, d), N = Q.shape[1:], K.shape[1]
    S = (Q * d**-0.5) @ K.mT
    if causal:
        S = S.masked_fill(~torch.ones(M, N, device=Q.device).tril(N - M).bool(), -torch.inf)
    P = torch.exp(S - lse[..., None]).nan_to_num(0.0).to(Q.dtype)
    dS = P * (dO @ V.mT - (dO * O).sum(-1, keepdim=True))
    return O, lse, dS @ K * d**-0.5, dS.mT @ Q * d**-0.5, P.mT @ dO


def in_orders(inputs, causal):
    """Both forms, with the entries of rows summed in several orders: the error of one order is luck, which another
    processor's library may not have."""
    d = inputs[0].shape[-1]
    for order in range(ORDERS):
        columns = torch.randperm(d, generator=torch.Generator().manual_seed(order)) if order else torch.arange(d)
        back = columns.argsort()
        for form in (plain, plain_from_lse):
            O, lse, *gradients = form(*(t[..., columns] for t in inputs), causal)
            yield O[..., back], lse, *(t[..., back] for t in gradients)


def assert_as_accurate_as_torch(got, inputs, causal):
    """The largest error is at most twice that of plain torch, plus two units in the last place of the largest entry.

    Plain torch's gradients are taken in both forms and in several orders, whichever errs most, as the library's own
    rule does.
    """
    truth = plain(*(t.double() for t in inputs), causal)
    forms = zip(*in_orders(inputs, causal), strict=True)
    for name, x, t, form in zip(("O", "lse", "dQ", "dK", "dV"), got, truth, forms, strict=False):
        assert x.shape == t.shape, name
        finite = t.isfinite()
        assert torch.equal(finite, x.isfinite()), f"{name} is not finite where it should be, or is where not"
        unit = torch.finfo(x.dtype).eps * 2.0 ** math.floor(math.log2(max(t[finite].abs().max().item(), 2.0**-60)))
        allowed = 2 * max((p.double() - t)[finite].abs().max().item() for p in form) + 2 * unit
        error = (x.double() - t)[finite].abs().max().item()
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


def operands(M, N, d, dtype=torch.float32, heads=2, device="cpu"):
    """Q, K, V and dO."""
    made = [torch.randn(heads, length, d, dtype=dtype, device=device) for length in (M, N, N, M)]
    made[0][0] *= 8  # weights of one head are far from equal
    return made


# The stages


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("M", "N"), LENGTHS)
@pytest.mark.parametrize("stage", FORWARDS)
def test_forward(stage, M, N, causal):
    inputs = operands(M, N, 24)
    got = importlib.import_module(stage).attention(*inputs[:3], causal, **FORWARDS[stage])
    assert_as_accurate_as_torch(got if isinstance(got, tuple) else (got,), inputs, causal)


@pytest.mark.parametrize("tiles", [{"B_r": 16, "B_c": 64}, {"B_r": 64, "B_c": 32}, {"B_r": 128, "B_c": 128}], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_tiles(tiles, causal):
    inputs = operands(130, 77, 24)
    import backward
    import flash1
    import flash2

    assert_as_accurate_as_torch((flash1.attention(*inputs[:3], causal, **tiles),), inputs, causal)
    O, lse = flash2.attention(*inputs[:3], causal, **tiles)
    grads = backward.backward(*inputs[:3], O, lse, inputs[3], causal, **tiles)
    assert_as_accurate_as_torch((O, lse, *grads), inputs, causal)


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_invariants_of_the_online_softmax(size):
    import online_softmax

    Q, K, V, _ = operands(77, 130, 24)
    O = online_softmax.attention(Q * size, K, V, True, B_c=16, check=True)  # asserts after every piece
    assert O.isfinite().all()


def test_tiles_above_the_diagonal_are_skipped(monkeypatch):
    import flash2

    visited = []
    monkeypatch.setattr(flash2, "online_softmax", lambda S, *rest: visited.append(S.shape) or online(S, *rest))
    online = importlib.import_module("online_softmax").online_softmax
    flash2.attention(*operands(128, 128, 24)[:3], True, 16, 16)
    assert len(visited) == 8 * 9 // 2


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("M", "N"), LENGTHS)
def test_backward(M, N, causal):
    import backward

    inputs = operands(M, N, 24)
    O, lse = backward.attention(*inputs[:3], causal)
    grads = backward.backward(*inputs[:3], O, lse, inputs[3], causal, 32, 16)
    assert_as_accurate_as_torch((O, lse, *grads), inputs, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_backward_in_fp64(causal):
    import backward

    inputs = [t.double() for t in operands(77, 130, 24)]
    O, lse = backward.attention(*inputs[:3], causal)
    got = O, lse, *backward.backward(*inputs[:3], O, lse, inputs[3], causal, 32, 16)
    for x, truth in zip(got, plain(*inputs, causal), strict=True):
        torch.testing.assert_close(x, truth, rtol=1e-11, atol=1e-11)


CASES = [
    # M, N, d, tiles
    (1, 1, 16, (16, 16)),
    (77, 77, 40, (32, 16)),
    (130, 130, 64, (64, 64)),
    (1, 77, 64, (16, 32)),
    (77, 130, 80, (64, 16)),
    (130, 77, 17, (16, 64)),
    (33, 20, 256, (32, 32)),
]


@IN_TRITON
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("M", "N", "d", "tiles"), CASES)
def test_triton(M, N, d, tiles, dtype, causal):
    import triton_backward
    import triton_forward

    inputs = operands(M, N, d, dtype, device=DEVICE)
    O, lse = triton_forward.attention(*inputs[:3], causal, *tiles)
    grads = triton_backward.backward(*inputs[:3], O, lse, inputs[3], causal, *tiles)
    assert_as_accurate_as_torch((O, lse, *grads), inputs, causal)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("M", "N"), [*LENGTHS, (1024, 1024)])
def test_hopper(M, N, d, dtype, causal):
    import hopper_forward

    inputs = operands(M, N, d, dtype, device="cuda")
    assert_as_accurate_as_torch(hopper_forward.attention(*inputs[:3], causal), inputs, causal)


# The files


@pytest.mark.parametrize("stage", STAGES)
def test_length(stage):
    assert len((MINIMAL / f"{stage}.py").read_text().splitlines()) <= 130


def test_length_of_the_benchmark():
    assert len((MINIMAL / "bench.py").read_text().splitlines()) <= 160


@pytest.mark.parametrize("stage", STAGES)
def test_runs_alone(stage, tmp_path):
    done = run(MINIMAL / f"{stage}.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_benchmark_counts_no_first_run():
    naps = iter((0.3, *[0.001] * 60))
    assert importlib.import_module("bench").seconds(lambda: time.sleep(next(naps)), budget=0.02) < 0.1
    assert 30 < len(list(naps)) < 60, "runs until the budget is spent"
    naps = iter((0.0, 0.05))
    assert importlib.import_module("bench").seconds(lambda: time.sleep(next(naps)), budget=0.0) >= 0.05


def test_benchmark_runs(tmp_path):
    done = run(MINIMAL / "bench.py", tmp_path, "--length", "100", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    for stage in (*STAGES, "roofline"):
        assert stage in done.stdout
    if not torch.cuda.is_available():
        assert "TRITON_INTERPRET=1" in done.stdout  # why stages 6 and 7 are missing


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_compiles_without_a_gpu(target, tmp_path):
    done = run(Path(__file__).parent / "offline.py", tmp_path, target, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {"forward", "delta", "dkdv", "dq"} | ({"hopper forward"} if target == "sm_90" else set())
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        assert row["shared"] <= (163 if target == "sm_80" else 227) * 1024, row
        if row["dtype"] != "float32":
            assert row["spills"] <= 4, row  # Triton 3.9 has two where 3.6 has none
            assert row["matrix"] or row["kernel"] == "delta", row
        if row["kernel"] == "hopper forward":
            assert row["tma"], row
            assert row["matrix"] == ["HGMMA"], row


def run(file, tmp_path, *arguments, **environment):
    """Run a script in a separate process."""
    given = {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(file), *arguments]
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
