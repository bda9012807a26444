"""explain(): what would run, without running it."""

import pytest
import torch

import tilewise as tw
from tilewise.backend import Missing, load

on_triton = pytest.mark.skipif(isinstance(load("triton"), Missing), reason="there is no Triton for its kernels")


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


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_it_answers_for_cards_that_are_not_here(device):
    q = meta(2, 4096, 8, 128)
    found = tw.explain(q, q, q, mask=tw.Causal(), device=device)
    assert found.refusals["cpu"]
    assert any(device in reason for reason in found.refusals["cpu"])


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
