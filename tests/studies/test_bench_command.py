"""python -m studies bench: tables, JSON for programs, a sentence and exit status 2 for bad input."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from studies.app import app
from studies.bench import results
from studies.bench.suites import FORWARD, SUITES


def call(*arguments):
    return CliRunner().invoke(app, arguments, prog_name="studies")


def sentence(result):
    """What a person reads, without the frame round it."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("bench --suite nope", "choose from paper, classic, long, short, cpu"),
        ("bench --suite paper --device cpu", "must be cuda, got cpu; run it where there is a GPU"),
        ("bench --suite cpu --device cpu --match D128", "got D128; choose from a name such as fp32 full"),
        ("bench --peer me --device cpu", "--peer must name a peer, got 'me'; choose from"),
        ("bench --show colour", "choose from"),
        ("bench --device tpu", "cpu or cuda"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, says):
    result = call(*arguments.split())
    assert result.exit_code == 2
    assert says in sentence(result)
    assert "Traceback" not in result.output


def tiny(monkeypatch, name="cpu"):
    cases = tuple(replace(case, length=64) for case in SUITES[name].cases[:2])
    small = replace(SUITES[name], cases=cases, passes=(FORWARD,), rounds=2, matmul=64, quick_lengths=(64,))
    monkeypatch.setitem(SUITES, name, small)


def test_bench_prints_json_that_parses(monkeypatch):
    tiny(monkeypatch)
    result = call("bench", "--suite", "cpu", "--device", "cpu", "--json", "-")
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout)["suites"]["cpu"]
    assert {row["status"] for row in run["rows"]} == {"ok"}
    assert {"commit", "kernels", "device", "versions", "when"} <= set(run["environment"])
    keys = {"case", "implementation", "pass_", "milliseconds", "milliseconds_p20", "milliseconds_p80", "tflops"}
    assert keys | {"of_matmul", "peak_bytes", "host_microseconds", "error"} <= set(run["rows"][0])


def test_bench_goes_on_with_the_cases_that_its_file_lacks(monkeypatch, tmp_path):
    tiny(monkeypatch)
    (case, _), suite = SUITES["cpu"].cases, SUITES["cpu"]
    monkeypatch.setitem(SUITES, "cpu", replace(suite, cases=(case, replace(case, length=48))))
    arguments = ("bench", "--suite", "cpu", "--device", "cpu", "--resume", "--results", str(tmp_path))
    assert call(*arguments).exit_code == 0
    (file,) = tmp_path.glob("*/bench.json")
    content = results.load(file)
    rows = content["suites"]["cpu"]["rows"]
    first = [row for row in rows if row["case"] == rows[0]["case"]]
    content["suites"]["cpu"] |= {"rows": first, "partial": True}
    file.write_text(json.dumps(content))
    result = call(*arguments)
    assert "cpu 1/1" in result.output + result.stderr
    run = results.load(file)["suites"]["cpu"]
    assert (len(run["rows"]), run["partial"], run["rows"][: len(first)]) == (len(rows), False, first)
    content["suites"]["cpu"]["environment"]["kernels"] = "others"
    file.write_text(json.dumps(content))
    assert "cpu 2/2" in (result := call(*arguments)).output + result.stderr
    assert call("bench", "--resume").exit_code == 2


def test_bench_merges_and_prints_a_table(monkeypatch, tmp_path):
    tiny(monkeypatch)
    arguments = ["--suite", "cpu", "--device", "cpu", "--quick", "--results", str(tmp_path / "results")]
    result = call("bench", *arguments)
    assert result.exit_code == 0, result.output
    assert "GFLOP/s" in result.stdout
    assert "\x1b[" not in result.stdout
    (file,) = (tmp_path / "results").glob("*/bench.json")
    assert results.load(file)["suites"]["cpu"]["partial"]


def test_the_llmc_suite_runs_on_a_cpu_too(monkeypatch):
    tiny(monkeypatch, "llmc")
    result = call("bench", "--suite", "llmc", "--device", "cpu", "--quick")
    assert result.exit_code == 0, result.output
    assert "times as fast as standard attention" in result.stdout
    assert "tilewise ieee, head size 64, forward, against standard" in result.stdout
    assert "tilewise tf32: the CPU computes in plain fp32" in result.stdout


def test_bench_reads_the_results_file_before_measuring(tmp_path):
    (tmp_path / "notes.json").write_text("{}")
    result = call("bench", "--suite", "cpu", "--device", "cpu", "--json", str(tmp_path / "notes.json"))
    assert result.exit_code == 2
    assert "must be a results file of tilewise" in sentence(result)
