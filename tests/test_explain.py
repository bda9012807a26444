"""explain(): what would run, without running it."""

import pytest
import torch

import tilewise as tw
from tilewise.attention.api import with_defaults
from tilewise.attention.explain import problem_on
from tilewise.call.backend import Missing, load, select
from tilewise.call.check import check_arguments

on_triton = pytest.mark.skipif(isinstance(load("triton"), Missing), reason="there is no Triton for its kernels")


ON_GPUS = ("hopper", "triton")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_it_names_the_back_end_its_tiles_and_every_refusal():
    q = torch.zeros(1, 16, 2, 8)
    found = tw.explain(q, q, q, score=tw.SoftCap(2.0))
    assert found.backend == "cpu"
    assert found.tiles
    assert found.refusals["cpu"] == []
    assert found.refusals["triton"]


def test_it_prints_as_a_table():
    q = torch.zeros(1, 16, 2, 8)
    found = tw.explain(q, q, q, mask=tw.Causal())
    lines = str(found).splitlines()
    assert lines[0].split() == ["back", "end", "verdict"]
    assert any(line.startswith("cpu") and "runs this" in line and found.tiles in line for line in lines)
    assert any(
        line.startswith("triton") and "refuses" in line and found.refusals["triton"][0] in line for line in lines
    )


def test_it_tells_the_fused_path_from_the_tiled_one():
    q = torch.zeros(1, 16, 2, 8)
    assert "fused" in tw.explain(q, q, q, mask=tw.Causal()).tiles
    assert "tiled" in tw.explain(q, q, q, mask=tw.Window(3, 0)).tiles


@on_triton
def test_one_query_says_which_back_end_runs_which_pass():
    q, k = meta(1, 1, 32, 128), meta(1, 8192, 8, 128)
    found = tw.explain(q, k, k, device="sm_90")
    assert (found.backend, found.backward) == ("triton", "hopper")
    hopper, triton = (next(line for line in str(found).splitlines() if line.startswith(name)) for name in ON_GPUS)
    assert "runs the backward: backward" in hopper
    assert "forward" not in hopper
    assert "runs the forward: forward splits keys" in triton
    assert "dkdv" not in triton


@on_triton
def test_a_back_end_that_is_able_says_why_it_does_not_run():
    long, short = meta(2, 4096, 8, 128), meta(64, 32, 8, 128)
    assert "triton    can run it; hopper is asked first" in str(tw.explain(long, long, long, device="sm_90"))
    assert "hopper    can run it; measured slower here" in str(tw.explain(short, short, short, device="sm_90"))


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_it_answers_for_cards_that_are_not_here(device):
    q = meta(2, 4096, 8, 128)
    found = tw.explain(q, q, q, mask=tw.Causal(), device=device)
    assert found.refusals["cpu"]
    assert any(device in reason for reason in found.refusals["cpu"])


@on_triton
@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_that_broke_the_rule_on_a_gpu_are_chosen_only_by_name(device):
    q, v = meta(2, 512, 8, 320, dtype=torch.float32), meta(2, 512, 8, 64, dtype=torch.float32)
    found = tw.explain(q, q, v, device=device)
    assert found.backend is None
    (reason,) = found.refusals["triton"]
    assert reason == (
        "its fp32 kernels for head sizes above 256, got 320 and 64, may round 4 times as much as PyTorch; "
        "pass backend='triton' to run them"
    )
    with pytest.raises(tw.Unsupported, match="as much as PyTorch; pass backend='triton'"):
        select(problem_of(q, v, device, None))
    named = tw.explain(q, q, v, device=device, backend="triton")
    assert named.backend == named.backward == "triton"
    assert "may round 4 times as much as PyTorch" in str(named)
    assert select(problem_of(q, v, device, "triton")).name == "triton"
    q, v = q.to(torch.bfloat16), v.to(torch.bfloat16)
    half = tw.explain(q, q, v, device=device)
    assert half.backend == ("hopper" if device == "sm_90" else "triton")
    assert "as much" not in str(half)


def problem_of(q, v, device, backend):
    """The problem of a plain call on a chip that is not here."""
    options = with_defaults("explain", {"backend": backend})
    given = {name: value for name, value in options.items() if name not in ("seed", "return_lse")}
    return problem_on(*check_arguments(q, q, v, **given), device)


@on_triton
def test_chips_whose_shared_memory_is_too_small_refuse_large_heads_by_name():
    q = meta(1, 64, 2, 512, dtype=torch.float16)
    found = tw.explain(q, q, q, device="sm_75", backend="triton")
    assert found.backend is None
    assert found.refusals["triton"] == ["sm_75 has too little shared memory for head sizes above 256, got 512 and 512"]


@on_triton
def test_fp32_dropout_is_refused_where_tiles_are_too_narrow_for_its_counters():
    q = meta(1, 64, 2, 512, dtype=torch.float32)
    found = tw.explain(q, q, q, device="sm_89", backend="triton", dropout=0.1)
    assert found.refusals["triton"] == [
        "its tiles for head sizes 512 and 512 in float32 on sm_89 have fewer than 16 rows or columns, too few for "
        "dropout; use bf16 or fp16"
    ]
    for device, dtype in (("sm_80", q.dtype), ("sm_90", q.dtype), ("gfx942", q.dtype), ("sm_89", torch.bfloat16)):
        x = q.to(dtype)
        assert tw.explain(x, x, x, device=device, backend="triton", dropout=0.1).backend == "triton"


@on_triton
def test_precisions_of_matrix_units_are_refused_above_head_size_256():
    q = meta(1, 64, 2, 512, dtype=torch.float32)
    found = tw.explain(q, q, q, device="sm_90", backend="triton", precision="tf32")
    assert found.refusals["triton"] == ["precision 'tf32' is not available on sm_90 above head size 256; it has ieee"]
    assert "products in ieee" in tw.explain(q, q, q, device="sm_90", backend="triton").tiles


def test_nothing_is_allocated_or_run():
    q = meta(64, 1 << 20, 32, 128)
    found = tw.explain(q, q, q, device="cpu")
    assert found.backend == "cpu"


def test_meta_tensors_need_a_device():
    q = meta(1, 8, 2, 8)
    with pytest.raises(ValueError, match="device"):
        tw.explain(q, q, q)


def test_it_takes_what_attention_takes():
    q = torch.zeros(5, 2, 8)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    found = tw.explain(
        q,
        q,
        q,
        mask=tw.Causal(),
        score=[tw.SoftCap(1.0), tw.Alibi(torch.ones(2))],
        scale=0.5,
        sink=torch.zeros(2),
        dropout=0.1,
        seed=3,
        layout=tw.Varlen(ends, ends),
        precision="ieee",
        deterministic=True,
        return_lse=True,
        backend="cpu",
    )
    assert found.backend == "cpu"


@on_triton
def test_tensors_that_are_here_have_addresses():
    whole = torch.zeros(64 * 128 + 1, dtype=torch.bfloat16)
    given = [part.view(1, 64, 2, 64) for part in (whole[:-1], whole[1:])]
    plans = [tw.explain(q, q, q, device="sm_90") for q in given]
    assert [plan.backend for plan in plans] == ["hopper", "triton"]
    assert "q does not start on a 16-byte boundary" in " ".join(plans[1].refusals["hopper"])


@on_triton
def test_torchs_setting_asks_for_deterministic_gradients():
    q, ids = meta(2, 128, 2, 64), torch.zeros(2, 128, dtype=torch.int32, device="meta")

    def ask():
        return tw.explain(q, q, q, mask=tw.Documents(ids, ids), device="sm_90").backend

    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert ask() == "hopper"
    torch.use_deterministic_algorithms(True)
    try:
        assert ask() == "triton"
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def test_forcing_a_back_end_that_refuses_leaves_none():
    q = torch.zeros(1, 8, 2, 8, dtype=torch.float64)
    found = tw.explain(q, q, q, backend="triton")
    assert found.backend is None
    assert found.refusals["triton"]


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_matmul_precision_is_asked_for(setting):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        q = torch.zeros(1, 8, 2, 8)
        assert tw.explain(q, q, q).backend == "cpu"
    finally:
        torch.set_float32_matmul_precision(before)
