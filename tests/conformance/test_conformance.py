"""Every case on every back end: as accurate as plain torch, and the same bits when run again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import exp, log
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn.attention import SDPBackend

import tilewise as tw
from tilewise.call.backend import load
from tilewise.call.calls import forget

from . import rule
from .cases import CASES, Call, Case, make

GPU = torch.cuda.is_available()
ON_GPU = ("hopper", "triton")
OF_FP32 = ("hopper-bf16x6", "hopper-fp16x3")
"""Hopper's kernels for fp32; "hopper" stands for those for 16-bit types."""
INTERPRETER = "triton-interpreter"
BACKENDS = ("cpu", "cpu-tiled", *(ON_GPU if GPU else (INTERPRETER,)))


@contextmanager
def chosen(backend: str) -> Iterator[str]:
    """The back end's name for `attention`, and the CPU's set to the path that is meant."""
    cpu: Any = load("cpu")
    before, cpu.fuse = cpu.fuse, backend != "cpu-tiled"
    if before != cpu.fuse:
        forget()
    try:
        yield backend.partition("-")[0]
    finally:
        if before != cpu.fuse:
            forget()
        cpu.fuse = before


@lru_cache(4)
def prepared(case: Case, device: str) -> tuple[Call, rule.Results, rule.Bounds]:
    """The tensors of a case, its true results, and the errors it may have."""
    call = make(case, device)
    true = rule.truth(case, call)
    return call, true, rule.bounds(case, call, true)


def suited(case: Case, backend: str) -> Case:
    """The case; for Hopper, which takes head sizes in eights, with those, and in the types that its kernels are for."""
    kernel = backend.partition("-")
    if kernel[0] != "hopper" or case.dtype == torch.float64:
        return case
    D, D_v = (-(-size // 8) * 8 for size in (case.D, case.D_v or case.D))
    if kernel[2]:
        return replace(case, name=f"{case.name} in {kernel[2]}", precision=case.precision or kernel[2], D=D, D_v=D_v)
    if case.dtype != torch.float32:
        return replace(case, D=D, D_v=D_v)
    bf16, sink = torch.bfloat16, case.sink and torch.bfloat16
    return replace(case, name=f"{case.name} in bf16", dtype=bf16, sink=sink, precision=None, D=D, D_v=D_v)


def skip_unless_taken(case: Case, backend: str, call: Call) -> None:
    """Skips with the back end's own reasons if it refuses the case."""
    name = backend.partition("-")[0]
    tensors = {"score": call.score, "sink": call.sink}
    reasons = tw.explain(call.q, call.k, call.v, **tensors, **rule.options(case, call, name)).refusals[name]
    if reasons:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(
    "backend",
    [*BACKENDS, *(OF_FP32 if GPU else ())],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_accurate_as_torch_and_repeatable(case, backend, record_property):
    record_property("case", case.name)
    record_property("backend", backend)
    on_gpu = backend in (*ON_GPU, *OF_FP32)
    if backend == INTERPRETER and case.size != "tiny":
        pytest.skip("too large for Triton's interpreter")
    if not on_gpu and case.size != "tiny" and crc32(case.name.encode()) % 3:
        pytest.skip("of the large cases a CPU runs a third")
    if backend in OF_FP32 and case.dtype != torch.float32:
        pytest.skip("it is not in fp32")
    case = suited(case, backend)
    call, true, allowed = prepared(case, "cuda" if on_gpu else "cpu")
    skip_unless_taken(case, backend, call)
    repeats = backend != INTERPRETER or crc32(case.name.encode()) % 4 == 0  # it is slow
    with chosen(backend) as name:
        first = rule.run(case, call, name)
        again = rule.run(case, call, name) if repeats else first
    assert {name: t.dtype for name, t in first.items()} == rule.result_types(call)
    rule.assert_as_accurate_as_torch(first, true, allowed, case.precision)
    for result in ("o", "lse", "dk", "dv", *(["dq"] if case.deterministic or not on_gpu else [])):
        same = torch.equal(first[result].nan_to_num(nan=7.0), again[result].nan_to_num(nan=7.0))
        assert same, f"{result} differs when run again"


def test_an_error_is_a_miss_only_above_the_worst_of_all():
    others = iter([{"o": 1.0}, {"o": 3.0}, {"o": 2.0}])
    allowed = rule.Bounds(2.0, others, {"o": 0.5})
    assert allowed.misses({"o": 0.5}) == {}
    assert allowed.worst == {"o": 0.0}, "none of them was needed"
    assert allowed.misses({"o": 6.5}) == {}
    assert next(others) == {"o": 2.0}, "one is left"
    assert allowed.misses({"o": 6.6}) == {"o": (6.6, 6.5)}


def test_fresh_memory_is_poisoned():
    like = torch.zeros(3, dtype=torch.bfloat16)
    fresh = (torch.empty(3), torch.empty_like(like), like.new_empty(2), torch.empty_strided((2, 2), (1, 2)))
    assert all(t.isnan().all() for t in fresh)


def test_nothing_is_written_without_a_report(pytestconfig, monkeypatch, tmp_path):
    (conftest,) = (plugin for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "OUTCOMES"))
    monkeypatch.setattr(conftest, "OUTCOMES", {("causal", "cpu"): {"outcome": "passed", "reason": ""}})
    for file in (None, tmp_path / "report.json"):
        assert list(tmp_path.iterdir()) == []
        config = SimpleNamespace(getoption=lambda name, file=file: file)  # as with -p no:cacheprovider
        conftest.pytest_sessionfinish(SimpleNamespace(config=config))
    assert '"case": "causal"' in file.read_text()


def test_the_rival_computes_what_the_reference_does():
    device, kernel = ("cuda", SDPBackend.EFFICIENT_ATTENTION) if GPU else ("cpu", SDPBackend.MATH)
    whole = set()
    for case in CASES:
        if case.dtype != torch.float32 or case.size != "tiny":
            continue
        call = make(case, device)
        if not (found := rule.rival(case, call, kernel)):
            continue
        true = rule.truth(case, call)
        assert {name: t.shape for name, t in found.items()} == {name: true[name].shape for name in found}
        assert max(rule.errors(found, true).values()) < 3e-5, case
        whole |= {case.name} if len(found) == 4 else {case.strides}
    assert whole >= {"through o", "length 17", "sliced", "every_second", "size_first", "one_number"}


@pytest.mark.skipif(not GPU, reason="without tensor cores bf16x6 is plain fp32")
def test_the_bf16x6_forward_is_at_least_as_accurate_as_torch_over_the_list():
    ratios = []
    for case in CASES:
        call, true, _ = prepared(case, "cuda")
        if (
            case.dtype != torch.float32
            or case.precision not in (None, "bf16x6")
            or case.values not in ("normal", "large")
        ):
            continue
        taken = tw.explain(call.q, call.k, call.v, score=call.score, sink=call.sink, **rule.options(case, call, None))
        if taken.refusals["triton"]:
            continue
        got = rule.errors(rule.run(case, call, None), true)["o"]
        plain = rule.errors(rule.written_out(case, call)[0], true)["o"]
        if plain > 0.0:
            ratios.append(max(got, rule.unit(true["o"], torch.float32) / 2) / plain)
    assert ratios
    assert exp(sum(map(log, ratios)) / len(ratios)) <= 1.0
