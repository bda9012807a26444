"""python -m tilewise: tables, JSON for programs, a sentence and exit status 2 for bad input."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import tilewise as tw
from tilewise import cli
from tilewise.bench import results
from tilewise.bench.suites import FORWARD, SUITES
from tilewise.cli.app import app


def call(*arguments):
    return CliRunner().invoke(app, arguments, prog_name="tilewise")


def sentence(result):
    """What a person reads, without the frame round it."""
    return " ".join(result.output.replace("│", " ").split())


def test_info_names_every_back_end_and_why_it_cannot_run():
    found = json.loads(call("info", "--json").stdout)
    assert found["versions"]["tilewise"] == tw.__version__
    assert found["backends"]["cpu"]["cpu"] == []
    assert set(found["backends"]) == {"triton", "cpu"} or "triton" in found["backends"]
    assert all(isinstance(reasons, list) for by in found["backends"].values() for reasons in by.values())
    assert found["default"]["backend"] in found["backends"]
    assert tw.__version__ in call("info").stdout


def test_explain_answers_for_a_card_that_is_not_here():
    options = "--q 2,1024,16,64 --kv-heads 4 --mask causal --window 1023,0 --dtype bf16 --softcap 50 --dropout 0.1"
    plan = json.loads(call("explain", *options.split(), "--device", "sm_90", "--json").stdout)
    assert plan["backend"] == "hopper"
    assert plan["tiles"]
    assert "sm_90" in plan["refusals"]["cpu"][0]
    text = call("explain", *options.split(), "--device", "sm_75").stdout
    assert "no bf16" in text


@pytest.mark.parametrize(
    "options",
    [
        "--mask causal --mask padding --varlen",
        "--mask prefix --alibi --sink",
        "--mask documents --bias 1,16,1024,1024",
        "--mask dense --keys 512 --q 2,512,16,64 --v-size 128",
        "--window 128,- --dtype fp32 --precision bf16x6 --deterministic --scale 0.1",
        "--dtype fp64 --device cpu --backend cpu",
    ],
)
def test_explain_knows_every_option(options):
    result = call("explain", "--device", "sm_90", *options.split(), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["backend"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("explain --q 2,1024", "q must be 4 whole numbers"),
        ("explain --q a,b,c,d", "got 'a,b,c,d'"),
        ("explain --kv-heads 3", "multiple"),
        ("explain --dtype int8", "dtype must be one of"),
        ("explain --mask diagonal", "mask must be one of"),
        ("explain --window 5", "left,right"),
        ("explain --softcap -1", "cap"),
        ("explain --dropout 1.5", "[0, 1)"),
        ("explain --q 1,8,1,300", "256"),
        ("explain --backend magic", "backend must be"),
        ("bench --suite nope", "choose from paper, classic, long, cpu"),
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
    (file,) = tmp_path.glob("*.json")
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
    (file,) = (tmp_path / "results").glob("*.json")
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


def test_without_the_extra_one_sentence_says_what_to_install():
    block = "import sys; sys.modules['rich'] = None; sys.argv = ['tilewise', 'info']; import tilewise.__main__"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "The command line needs rich: pip install 'tilewise[cli]'"
    assert done.stdout == ""


def test_main_is_the_console_script(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tilewise", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("info", "explain", "warm", "bench", "tune"))
    assert not any(command in shown for command in ("study", "train", "demo"))


@pytest.mark.parametrize(
    "arguments", ["demo --out here", "train --model gpt2-124m", "study accuracy --quick", "study --help"]
)
def test_a_command_that_moved_says_where_it_is(arguments):
    result = call(*arguments.split())
    assert result.exit_code == 2
    name, *_ = arguments.split()
    assert f"`tilewise {name}` is now `python -m studies " in sentence(result)


def test_the_suite_that_moved_says_where_it_is(monkeypatch):
    monkeypatch.delitem(SUITES, "ablation", raising=False)
    result = call("bench", "--suite", "ablation", "--device", "cpu")
    assert result.exit_code == 2
    assert "`python -m studies bench --suite ablation`" in sentence(result)


def test_the_experiment_says_where_it_is():
    with pytest.raises(ImportError, match=r"import studies\.accumulation"):
        importlib.import_module("tilewise.experimental")
