"""The accuracy study: every error is measured against the specification, and all of it ends in one page."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

import tilewise as tw
from studies.accuracy import page as study_page
from studies.accuracy.measure import PART, SWEEPS, Finding, Point, quick, run
from studies.app import app
from studies.bench import results
from studies.bench.accuracy import NAMES
from studies.bench.peers import PEERS, Peer
from studies.bench.tables import STANDARD
from studies.pages import report
from tilewise.attention import reference

CPU = torch.device("cpu")
SMALL = Point(length=40, head_size=16)
SOME = tuple(PEERS[name] for name in ("tilewise ieee", "tilewise tiled", "sdpa math"))


def findings(point=SMALL, peers=SOME):
    (found,) = run([point], CPU, peers=peers)
    return {finding.implementation: finding for finding in found}


def test_every_field_of_a_point_has_a_sweep_that_changes_it_alone():
    assert set(SWEEPS) == {field.name for field in fields(Point)}
    for name, points in SWEEPS.items():
        values = [getattr(point, name) for point in points]
        assert len(set(values)) == len(values) > 1
        assert {replace(point, **{name: values[0]}) for point in points} == {points[0]}
        assert max(point.length for point in quick(points)) <= 1024


@pytest.mark.parametrize("point", [SMALL, replace(SMALL, scale=4.0, outliers=30.0, mean=1.0)])
def test_errors_are_those_against_the_reference(point):
    found = findings(point)["tilewise ieee"]
    x = point.inputs(CPU)
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    o = tw.attention(q, k, v, mask=tw.Causal(), precision="ieee")
    mine = (o.detach(), *torch.autograd.grad(o, (q, k, v), x.do))
    exact = [t.detach().double() for t in x[:4]]
    true = reference.attention(*exact[:3], mask=tw.Causal())[0], *reference.gradients(*exact, mask=tw.Causal())[:3]
    for name, result, truth in zip(NAMES, mine, true, strict=True):
        error = result.double() - truth
        assert found.relative[name] == pytest.approx(float(error.norm() / truth.norm()), rel=1e-3)
        assert found.largest[name] == pytest.approx(float(error.abs().max() / truth.abs().max()), rel=1e-3)
        assert 0.0 < found.relative[name] < 1e-5


def test_plain_torch_is_the_first_of_every_point():
    found = findings()
    assert next(iter(found)) == STANDARD
    assert set(found) == {STANDARD, *(peer.name for peer in SOME)}
    assert 0.0 < found[STANDARD].relative["dq"] < 1e-6


def test_inputs_are_what_the_point_says():
    plain, bent = (point.inputs(CPU) for point in (SMALL, replace(SMALL, scale=4.0, mean=10.0)))
    torch.testing.assert_close(bent.q, plain.q * 4.0)
    torch.testing.assert_close(bent.k, plain.k + 10.0)
    torch.testing.assert_close(bent.v, plain.v + 10.0)
    assert torch.equal(bent.do, plain.do)
    long = Point(length=4096)
    changed = replace(long, outliers=30.0).inputs(CPU).v != long.inputs(CPU).v
    assert float(changed.float().mean()) == pytest.approx(1e-3, rel=0.2)


def test_who_cannot_run_says_why():
    def fail(case, device):
        raise RuntimeError("no such kernel")

    found = findings(peers=(PEERS["sdpa efficient"], PEERS["tilewise tf32"], Peer("broken", fail)))
    assert (found["sdpa efficient"].status, found["broken"].status) == ("refused", "failed")
    assert found["broken"].why == "RuntimeError: no such kernel"
    lines = study_page.reasons(list(found.values()))
    assert "tilewise tf32: the CPU computes in plain fp32, which is tilewise ieee (1 points)" in lines


def test_a_wrong_result_is_seen():
    def off(case, device):
        return lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()) * 1.01

    found = findings(peers=(Peer("off", off),))["off"]
    assert found.relative["o"] == pytest.approx(0.01, rel=1e-3)


def test_the_summary_is_over_plain_torch():
    def at(length, name, error):
        point = {"length": length, "head_size": 64, "scale": 1.0, "outliers": 1.0, "mean": 0.0}
        return Finding(point, name, relative=dict.fromkeys(NAMES, error), largest=dict.fromkeys(NAMES, error))

    found = [at(n, name, e) for n, ours in ((1024, 1e-7), (2048, 4e-7)) for name, e in ((STANDARD, 2e-7), ("x", ours))]
    assert study_page.summary(found) == ["x: o 1.00 (2.00), dq 1.00 (2.00), dk 1.00 (2.00), dv 1.00 (2.00)."]
    assert study_page.summary(found * 2) == study_page.summary(found)  # points that several sweeps share count once
    found[3].relative["dq"] = math.nan
    assert "dq nan (nan)" in study_page.summary(found)[0]


def test_the_command_measures_merges_draws_and_the_report_writes_the_page(tmp_path):
    folder = tmp_path / "results"
    arguments = ["accuracy", "--quick", "--device", "cpu", "--longest", "512", "--results", str(folder)]
    for name in ("length", "scale"):
        result = CliRunner().invoke(app, [*arguments, "--sweep", name, "--plot", str(tmp_path / "p.png")])
        assert result.exit_code == 0, result.output
        assert "tilewise ieee: o " in result.stdout
        assert (tmp_path / f"p-{name}.png").stat().st_size > 5000
    (file,) = folder.glob("*/bench.json")
    content = json.loads(file.read_text())
    assert set(content[PART]) == {"length", "scale"}
    assert content[PART]["scale"]["partial"]
    assert results.load(file)["suites"] == {}
    report.write(folder, tmp_path / "docs")
    page = (tmp_path / "docs/results/accuracy.md").read_text()
    for name in ("length", "scale"):
        picture = f"{file.parent.name}-accuracy-{name}.png"
        assert f"images/{picture}" in page
        assert (tmp_path / "docs/images" / picture).stat().st_size > 5000
    assert "changed since" not in page
    assert "| dq | standard |" in page


def test_an_unknown_sweep_ends_with_a_sentence():
    result = CliRunner().invoke(app, ["accuracy", "--sweep", "colour", "--device", "cpu"])
    assert result.exit_code == 2
    assert "choose from length, head_size, scale" in " ".join(result.output.replace("│", " ").split())
