"""The accumulation study: errors against fp64, overflow counted, kernels compiled, and all of it ends in one page."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields, replace

import pytest
import torch
from typer.testing import CliRunner

from studies.accumulation import Accumulate, attention, page, speed
from studies.accumulation import measure as accumulation
from studies.accumulation.measure import (
    COMBINATIONS,
    FACTOR,
    FITTED,
    IN_LOOP,
    KERNELS,
    PART,
    PLAIN,
    SWEEPS,
    TILES,
    Combination,
    Finding,
    Point,
    quick,
    run,
    truth,
)
from studies.accumulation.speed import LENGTHS, Kernel, Time, cases
from studies.app import app
from studies.bench import results
from studies.pages import report
from tilewise.attention import reference

CPU = torch.device("cpu")
SMALL = Point(length=96)
HALF = Combination(values="fp16")


def findings(point=SMALL, combinations=COMBINATIONS):
    (found,) = run([point], CPU, combinations=combinations)
    return {finding.of: finding for finding in found}


def test_every_combination_is_there_once():
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) == 32
    assert len(KERNELS) == 16
    assert {(c.scores, c.values, c.exp2) for c in KERNELS} == {(c.scores, c.values, c.exp2) for c in COMBINATIONS}


def test_every_field_of_a_point_has_a_sweep_that_changes_it():
    assert set(SWEEPS) == {field.name for field in fields(Point)}
    for name, points in SWEEPS.items():
        changed = "channel" if name == "normalised" else name
        assert len({getattr(point, changed) for point in points}) == len(points) > 1
        assert {replace(point, **{changed: getattr(points[0], changed)}) for point in points} == {points[0]}
        assert all(point.normalised == (name == "normalised") for point in points)
        assert max(point.length for point in quick(points)) <= 512


def test_combinations_are_what_they_say():
    v = torch.tensor([3.0, -20.0])
    assert PLAIN.accumulate(v) == Accumulate()
    assert Combination("fp16", "fp16", FACTOR).accumulate(v) == Accumulate("fp16", "fp16", stability=True)
    assert Combination(way=FITTED).accumulate(v) == Accumulate(stability=20.0)
    assert Combination(way=IN_LOOP, exp2="halves").accumulate(v) == Accumulate(division="in-loop", exp2="halves")


def test_errors_are_those_against_the_reference():
    x = SMALL.operands(CPU)
    true = reference.attention(*(t.double() for t in x[:3]))[0]
    torch.testing.assert_close(truth(x), true)
    found = findings()
    for combination in (PLAIN, HALF):
        error = attention(*x[:3], accumulate=combination.accumulate(x.v)).double() - true
        assert found[combination].relative == pytest.approx(float(error.norm() / true.norm()))
        assert found[combination].largest == pytest.approx(float(error.abs().max() / true.abs().max()))
        assert found[combination].overflow == 0.0


def test_overflow_is_counted():
    found = findings(replace(SMALL, mean=60000.0), (PLAIN, HALF, Combination(values="fp16", way=FACTOR)))
    plain, half, stable = found.values()
    assert half.overflow > 0.5
    assert half.relative is None
    assert plain.overflow == stable.overflow == 0.0
    assert stable.relative < 1e-2


def test_inputs_are_what_the_point_says():
    plain, bent = SMALL.operands(CPU), replace(SMALL, scale=4.0, channel=10.0, mean=100.0).operands(CPU)
    torch.testing.assert_close(bent.q[..., 1:], plain.q[..., 1:] * 4.0)
    torch.testing.assert_close(bent.k[..., 0], (plain.k[..., 0].float() * 10.0).half(), rtol=1e-2, atol=1e-3)
    assert float(bent.v.float().mean()) == pytest.approx(100.0, rel=0.02)
    assert float(bent.v.float().std()) == pytest.approx(10.0, rel=0.1)
    normalised = replace(SMALL, channel=300.0, normalised=True).operands(CPU)
    for t in (normalised.q, normalised.k):
        torch.testing.assert_close(t.float().square().mean(-1), torch.ones(t.shape[:-1]), rtol=1e-2, atol=0.0)
    assert replace(SMALL, mean=60000.0).operands(CPU).v.isfinite().all()


def test_a_kernel_is_compiled_and_its_registers_are_read():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "studies.accumulation.compiled", "sm_90", "96", "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernel = Kernel(**json.loads(done.stdout))
    assert kernel.of == KERNELS[10]
    assert tuple(kernel.tiles) == TILES[64][0]
    assert 64 < kernel.registers <= 255
    assert kernel.spills >= 0
    assert kernel.shared > 0
    assert kernel.why is None


def at(point, combination, relative=None, overflow=0.0):
    return Finding(asdict(point), asdict(combination), relative=relative, largest=relative, overflow=overflow)


def test_the_verdict_is_over_fp32_sums():
    one, two = SWEEPS["length"][0], SWEEPS["length"][1]
    found = {
        "length": [at(one, PLAIN, 1e-4), at(one, HALF, 2e-4), at(two, PLAIN, 1e-4), at(two, HALF, 8e-4)],
        "mean": [at(SWEEPS["mean"][-1], PLAIN, 1e-4), at(SWEEPS["mean"][-1], HALF, overflow=0.25)],
    }
    _, (plain, half) = page.verdicts(found)
    assert plain[4:] == ["1.00", "1.0, keys 1k", "nowhere"]
    assert half[4:] == ["4.00", "8.0, keys 2k", "mean of v 60000"]
    head, lines = page.table("mean", found["mean"])
    assert head[4:] == ["60000"]
    assert lines[1] == ["fp32", "fp16", "delayed", "fp32", "overflow 25%"]


def test_errors_are_summed_up_in_sentences():
    one, two = SWEEPS["length"][0], SWEEPS["length"][-1]
    found = {
        "length": [at(one, PLAIN, 1e-4), at(one, HALF, 2e-4), at(two, PLAIN, 1e-4), at(two, HALF, 8e-4)],
        "mean": [at(SWEEPS["mean"][-1], HALF, overflow=0.25)],
    }
    (line,) = page.error_sentences(found)
    assert line == (
        "PV fp16, delayed: errors over those of fp32 sums, by keys: 2.0 at 1k, 8.0 at 64k. Overflow: mean of v 60000."
    )


def timed(share):
    """Times of all kernels, those with fp16 sums taking `share` of the time of the others."""
    rows = []
    for size in TILES:
        for case in cases(size, LENGTHS[:2]):
            for c in KERNELS:
                ms = 1.0 if (c.scores, c.values) == ("fp32", "fp32") else share
                rows.append(Time(asdict(case), str(c), asdict(c), list(TILES[size][0]), ms, ms, ms, 500.0))
            rows.append(Time(asdict(case), "tilewise", milliseconds=0.5, tflops=900.0))
    return rows


def test_it_says_whether_it_pays():
    for share, words in ((0.8, "fp16 sums pay, exp2 in halves pays"), (1.1, "fp16 sums do not pay, exp2 in halves")):
        lines = page.speed_sentences(timed(share))
        assert [line.split(":")[0] for line in lines] == ["Head size 64", "Head size 128"]
        assert all(words in line and f"both in fp16 {share:.2f}" in line for line in lines)
    head, lines = page.speed_table(timed(0.8), 64)
    assert head == ["QK", "PV", "division", "exp2", "tiles", "1k", "2k", "time over fp32 sums'"]
    assert ["", "", "tilewise", "", "", "900", "900", "0.500"] in lines


def test_registers_are_compared():
    kernels = [
        Kernel("sm_90", 64, [128, 64, 8, 3], asdict(c), registers, spills, 1)
        for c, registers, spills in ((PLAIN, 200, 0), (HALF, 150, 8))
    ]
    (line,) = page.kernel_sentences(kernels)
    assert line == ("sm_90: registers saved a thread, of 200 with fp32 sums: P V in fp16 50. 1 of 2 kernels spill.")
    _, lines = page.kernel_table(kernels)
    assert [line[-1] for line in lines] == ["200", "150 + 8 B"]


def test_the_command_measures_merges_draws_and_the_report_writes_the_page(tmp_path):
    folder = tmp_path / "results"
    arguments = ["accumulation", "--quick", "--device", "cpu", "--results", str(folder)]
    arguments += ["--part", "length", "--part", "mean", "--part", "speed", "--plot", str(tmp_path / "p")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "nothing is timed on a CPU" in result.output
    assert (tmp_path / "p-errors.png").stat().st_size > 5000
    (file,) = folder.glob("*/bench.json")
    content = results.load(file)
    assert set(content[PART]) == {"length", "mean"}
    assert content[PART]["mean"]["partial"]
    report.write(folder, tmp_path / "docs")
    text = (tmp_path / "docs/results/accumulation.md").read_text()
    assert f"images/{file.parent.name}-accumulation-errors.png" in text
    assert (tmp_path / f"docs/images/{file.parent.name}-accumulation-errors.png").stat().st_size > 5000
    assert "Not timed on this device." in text
    assert "changed since" not in text
    assert "overflow " in text

    env = results.environment(CPU)
    results.merge(file, "speed", timed(0.8), env, False, part=PART)
    report.write(folder, tmp_path / "docs")
    text = (tmp_path / "docs/results/accumulation.md").read_text()
    assert "Head size 64: fp16 sums pay" in text
    assert "Not timed" not in text
    assert (tmp_path / f"docs/images/{file.parent.name}-accumulation-speed.png").stat().st_size > 5000


def test_unknown_names_end_with_a_sentence():
    for arguments, words in (
        (["--part", "colour"], "choose from length, scale, channel, normalised, mean, kernels, speed"),
        (["--target", "gfx942"], "target must be a chip of NVIDIA such as sm_90, got gfx942"),
    ):
        result = CliRunner().invoke(app, ["accumulation", "--device", "cpu", *arguments])
        assert result.exit_code == 2
        assert words in " ".join(result.output.replace("│", " ").split())


def test_kernels_are_timed_in_turns_with_their_best_tiles(monkeypatch):
    """In the interpreter, on a tiny problem: what a GPU does, but for its numbers."""
    pytest.importorskip("triton")
    monkeypatch.setattr(speed, "TOKENS", 32)
    monkeypatch.setattr(speed, "WIDTH", 64)
    monkeypatch.setattr(speed, "CHOOSING", 16)
    monkeypatch.setattr(speed, "ROUNDS", 2)
    for module in (accumulation, speed):
        monkeypatch.setattr(module, "TILES", {64: ((16, 16, 4, 1), (15, 16, 4, 1))})  # no power of two: cannot run
    monkeypatch.setattr(speed, "KERNELS", (PLAIN, HALF))
    (rows,) = speed.times(CPU, lengths=(16,))
    assert [row.implementation for row in rows] == [str(PLAIN), str(HALF), *speed.COMPARED]
    for row in rows[:3]:
        assert row.why is None
        assert 0.0 < row.milliseconds_p20 <= row.milliseconds <= row.milliseconds_p80
        assert row.tflops == pytest.approx(row.on.flops("forward") / row.milliseconds / 1e9)
        assert row.on.length == 16
        assert row.on.batch == 2
    assert [row.tiles for row in rows[:2]] == [[16, 16, 4, 1]] * 2
    assert rows[3].milliseconds is None
    assert rows[3].why
    for module in (accumulation, speed):
        monkeypatch.setattr(module, "TILES", {64: ((15, 16, 4, 1),)})
    (rows,) = speed.times(CPU, lengths=(16,))
    assert rows[0].milliseconds is None
    assert "power of 2" in rows[0].why
