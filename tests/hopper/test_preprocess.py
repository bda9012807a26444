"""The kernel before Hopper's backward, in Triton's interpreter: row values, and zeros where the main kernel counts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hopper.calls import call

import tilewise as tw

pytest.importorskip("triton")
import triton

from tilewise.hopper import launch
from tilewise.hopper.backward import preprocess
from tilewise.hopper.plan import plan

D = 128


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("M", "N", "H", "H_k", "programs"),
    [(200, 256, 4, 1, 2), (7, 9000, 4, 2, 2), (1, 20000, 2, 1, 2), (300, 300, 2, 1, 1)],
    ids=str,
)
def test_it_computes_delta_and_zeros_every_count(M, N, H, H_k, programs, monkeypatch):
    """Also more semaphores than its programs zero in one step: few queries, many keys."""
    nothing = SimpleNamespace(gdc_launch_dependents=lambda **_: None)
    monkeypatch.setattr(triton.language.extra, "cuda", nothing, raising=False)
    torch.manual_seed(0)
    p, _ = call(M, N, D, mask=tw.Causal(), H=H, H_k=H_k)
    pl = plan(p)
    pl = replace(pl, backward_tile=pl.backward_tile._replace(GQA_PROGRAMS=programs))
    scratch = pl.empty_scratch(p, torch.device("cpu"))
    for tensor in launch.tensors_of(scratch):
        if tensor is not None:
            tensor.fill_(7)
    o, do = torch.randn(2, p.B, M, H, D).unbind()
    lse = torch.randn(p.B, H, M)
    made = launch.preprocess_launch(p, pl, o, do, None, lse, scratch, None, None, None)
    preprocess.attention_backward_preprocess[(made.programs,)](*made.arguments, tile=made.constants["tile"])
    found = scratch.delta.view(p.B, H, -1)[..., :M]
    torch.testing.assert_close(found, (o * do).sum(-1).transpose(1, 2), rtol=1e-5, atol=1e-4)
    assert not scratch.done.any()
    assert scratch.ready is None or not scratch.ready.any()
    if programs > 1:
        assert not scratch.gqa_sums.semaphore.any()
        assert (scratch.gqa_sums.sums == 7).all(), "which each program writes before another reads"
