"""studies/bench/functions.py: rows have times, errors and bars, a later run goes on, and the table says what holds."""

import json
import subprocess
from argparse import Namespace

import pytest
import torch

from studies.bench import functions, results
from studies.bench.mods import MODS, Bar
from studies.bench.suites import BACKWARD, FORWARD

NAMES = ("window", "T5")


def content(folder):
    (file,) = folder.glob("*/functions.json")
    return results.unpacked(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The arguments of a rehearsal, its folder and what its file holds."""
    folder = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--quick", "--results", str(folder)]
    for name in NAMES:
        arguments += ["--mod", name]
    assert functions.main(arguments) == 0
    return Namespace(arguments=arguments, folder=folder, content=content(folder))


def test_each_row_has_times_and_errors_of_everybody_or_says_why_not(rehearsed):
    rows = rehearsed.content["rows"]
    assert [(row["mod"], row["pass"]) for row in rows] == [(name, p) for name in NAMES for p in (FORWARD, BACKWARD)]
    for row in rows:
        ours = {"tilewise", *(f"tilewise {name}" for name in OURS[row["mod"]])}
        flex = {"flex"} if row["pass"] == BACKWARD or row["mod"] == "T5" else FLEX
        assert row["milliseconds"].keys() == row["tflops"].keys() == row["errors"].keys()
        assert row["milliseconds"].keys() >= ours
        assert row["milliseconds"].keys() | row["why"].keys() == ours | flex
        assert all(of > 0 for of in row["milliseconds"].values())
        names = {"o"} if row["pass"] == FORWARD else {"dq", "dk", "dv"} | ({"dtensor"} if row["mod"] == "T5" else set())
        assert all(each.keys() == names and max(each.values()) < 0.02 for each in row["errors"].values())
        for bar in row["bars"]:
            assert (bar["ratio"] is None) == (bar["than"] not in row["milliseconds"])


OURS = {"window": ("Window",), "T5": ()}
FLEX = {"flex", functions.KEPT, functions.COMPILED}


def test_a_later_run_measures_nothing_again_unless_programs_have_changed(rehearsed, monkeypatch):
    monkeypatch.setattr(functions, "race", lambda *given: pytest.fail("it measures again"))
    assert functions.main(rehearsed.arguments) == 0
    assert content(rehearsed.folder) == rehearsed.content
    (file,) = rehearsed.folder.glob("*/functions.json")
    env = rehearsed.content["environment"]
    assert len(functions.saved(file, env)) == len(rehearsed.content["rows"])
    assert functions.saved(file, env | {"programs": "others"}) == []


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(functions, "ours", lambda *given: lambda q, k, v: q)
    monkeypatch.setattr(functions, "flex", lambda *given: {})
    mod = MODS["causal"]
    rows = functions.rows_of(mod, [mod.of_length(functions.QUICK)], torch.device("cpu"), "cpu", set())
    row = next(rows)
    assert row["milliseconds"] == {}
    assert row["why"] == dict.fromkeys(("tilewise", "tilewise Causal"), "wrong, so not timed")
    assert [bar["ratio"] for bar in row["bars"]] == [None, None]


def test_each_mod_has_a_process_and_those_that_die_are_counted(rehearsed, monkeypatch, capsys):
    commands = []

    run_really = subprocess.run

    def run(command, timeout=None, **options):
        if "studies.bench.functions" not in command:  # git
            return run_really(command, **options)
        commands.append(command)
        if command[-1] == "T5":
            raise subprocess.TimeoutExpired(command, timeout)
        return Namespace(returncode=-11 if command[-1] == "causal" else 0)

    monkeypatch.setattr(functions.subprocess, "run", run)
    arguments = ["--device", "cpu", "--quick", "--results", str(rehearsed.folder)]
    assert functions.main(arguments) == 2
    assert [command[3:] for command in commands] == [[*arguments, "--mod", name] for name in MODS]
    cut, *lines = capsys.readouterr().out.splitlines()
    assert cut == "T5 was cut off after 180 s"
    assert lines[:-1] == functions.table(rehearsed.content["rows"])[:-1]


def test_contenders_are_called_before_they_are_measured(capsys):
    assert functions.main(["--device", "cpu", "--quick", "--compile", "--mod", "causal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("causal B2 H4 D128 N64 forward tilewise: ")
    assert any(" backward flex: " in line and "does not support backward on CPU" in line for line in lines)


def test_the_table_says_which_bars_hold():
    bars = [functions.judged(Bar("flex", least), {"tilewise": 1.0, "flex": 1.3}) for least in (1.2, 1.4)]
    bars.append(functions.judged(Bar("sdpa efficient", 1.0), {"tilewise": 1.0}))
    *lines, last = functions.table([{"mod": "T5", "size": "B1", "pass": FORWARD, "bars": bars}])
    assert [line.split()[-1] for line in lines] == ["holds", "MISSED", "measured"]
    assert last == "1 of 3 bars hold"


def test_every_bar_is_against_a_contender():
    for mod in MODS.values():
        problem = functions.Problem(mod, mod.of_length(functions.QUICK), torch.device("cpu"), "cpu")
        names = {*problem.attends()}
        for bar in mod.bars:
            assert {bar.than, bar.ours} <= names
            assert set(bar.passes) <= {FORWARD, BACKWARD}
