"""make card, on a pretended GPU: what is cut off goes on, what fails stops nothing, what passed is not run again."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import card
from card_steps import ROOT, Step, of_tests, steps

from studies.bench import results
from studies.bench.results import Row
from studies.bench.suites import FORWARD, SUITES

CASES = """
import time, pathlib
import pytest

HERE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("n", range(4))
def test_some(n):
    time.sleep(float((HERE / "seconds").read_text()))
    with open(HERE / "ran", "a") as file:
        file.write(f"{{n}} ")
    assert n != {bad}, "the one that fails"
"""


@pytest.fixture
def gpu(tmp_path):
    """A pretended one: its log, and a step of four tests."""
    made = Pretended(tmp_path)
    made.write()
    return made


class Pretended:
    def __init__(self, folder, workers=0):
        self.folder, self.log = folder, card.Log(folder / "results" / "pretended" / card.STEPS)
        file, plain = folder / "test_some.py", ("-c", "/dev/null", "--rootdir", str(folder), "-p", "no:cacheprovider")
        step = of_tests("some", str(file), *plain, kernels=("",), minutes=0.1, files=file.name, workers=workers)
        self.step = replace(step, folder=folder)

    def write(self, seconds=0.0, bad=-1):
        """The tests: how long each takes, and the one that fails."""
        (self.folder / "seconds").write_text(str(seconds))
        (self.folder / "test_some.py").write_text(CASES.format(bad=bad))

    def ran(self):
        """Which tests, since the last question."""
        file = self.folder / "ran"
        found = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return sorted(map(int, found))

    def run(self, *more, state="a", minutes=1.0):
        todo = [self.step, *more]
        return card.run(todo, {step.name: state for step in todo}, self.log, minutes)

    def outcome(self, state="a", name="some"):
        return self.log.read()[name, state]


def one_line(name, code, folder):
    return Step(name, ("-c", code), ("",), 0.1, folder=folder)


def test_what_has_passed_is_not_run_again(gpu):
    assert gpu.run() == 0
    assert gpu.ran() == [0, 1, 2, 3]
    assert gpu.run() == 0
    assert gpu.ran() == []
    assert gpu.run(state="b") == 0
    assert gpu.ran() == [0, 1, 2, 3]
    assert len(gpu.log.path.read_text().splitlines()) == 2, "one line for each state"


def test_a_failure_stops_nothing_keeps_its_name_and_runs_again_alone(gpu, capfd):
    gpu.write(bad=1)
    later = one_line("later", "print('later')", gpu.folder)
    assert gpu.run(later) == 1
    assert gpu.ran() == [0, 1, 2, 3]
    assert gpu.outcome(name="later").files
    (name, why), *others = gpu.outcome().failed.items()
    assert (name, others) == ("test_some.py::test_some[1]", [])
    assert "the one that fails" in why
    assert name in capfd.readouterr().out
    assert gpu.run(later) == 1
    assert gpu.ran() == [1]
    gpu.write(bad=-1)  # a test is its name and the text of its file
    assert gpu.run(later) == 0
    assert gpu.ran() == [0, 1, 2, 3]
    assert not gpu.outcome().failed


def test_a_command_that_fails_is_saved_with_its_last_lines(gpu):
    assert gpu.run(one_line("broken", "raise SystemExit('no such thing')", gpu.folder)) == 1
    assert "no such thing" in gpu.outcome(name="broken").failed[card.ITSELF]


def test_the_minutes_are_kept_and_the_next_run_goes_on(gpu):
    gpu.write(seconds=5)
    assert gpu.run(one_line("later", "pass", gpu.folder), minutes=8 / 60) == 0
    first = gpu.ran()
    assert len(first) < 4, "the time was for fewer"
    assert ("later", "a") not in gpu.log.read()
    gpu.write()
    assert gpu.run() == 0
    assert sorted(first + gpu.ran()) == [0, 1, 2, 3]


def test_a_run_that_is_killed_in_the_middle_of_a_step_has_lost_nothing(gpu):
    gpu.write(seconds=1, bad=0)
    script = f"""
import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(ROOT / "tools")!r}]
from pathlib import Path
from test_card import Pretended
sys.exit(Pretended(Path({str(gpu.folder)!r}), workers=1).run())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    while not gpu.log.path.exists() or gpu.log.path.read_text().count('"outcome"') < 2:
        assert process.poll() is None, "it ended early"
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    outcome = gpu.outcome()
    assert list(outcome.failed) == ["test_some.py::test_some[0]"]
    assert not outcome.files
    time.sleep(2)  # what it started dies at its next word
    first = gpu.ran()
    (gpu.folder / "seconds").write_text("0")
    assert gpu.run() == 1
    assert set(first) | set(gpu.ran()) == {0, 1, 2, 3}
    outcome = gpu.outcome()
    assert (len(outcome.passed), list(outcome.failed)) == (3, ["test_some.py::test_some[0]"])


def test_a_step_that_is_silent_is_stopped_and_names_the_test(gpu):
    """On a busy machine pytest itself may be silent for longer before it begins."""
    gpu.write(seconds=600)
    for minutes in (0.1, 0.5, 2.5):
        gpu.step = replace(gpu.step, silence=minutes)
        assert gpu.run() == 1
        if first := gpu.outcome().failed.get("test_some.py::test_some[0]"):
            break
    assert first == f"silent for {minutes:g} minutes"


def test_a_half_written_line_is_left_out(gpu):
    gpu.run()
    with open(gpu.log.path, "a") as file:
        file.write(json.dumps({"step": "some"})[:9])
    assert len(gpu.outcome().passed) == 4


def test_the_list_says_what_has_run_and_what_waits(gpu, capsys):
    gpu.run()
    capsys.readouterr()
    later = one_line("later", "pass", gpu.folder)
    card.show([gpu.step, later], {"some": "a", "later": "a"}, [gpu.log])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "pretended:"
    assert shown[1].split()[:4] == ["seen", "some", "kernels", "a"]
    assert "4 passed" in shown[1]
    assert shown[2].split()[:2] == ["waits,", "0.1"]
    card.show([gpu.step], {"some": "b"}, [gpu.log])
    assert "not seen at these kernels; at a: 4 passed" in capsys.readouterr().out


def test_steps_have_names_of_their_own_and_commands_that_exist():
    todo = list(steps(results.RESULTS, "a card"))
    assert len({step.name for step in todo}) == len(todo)
    for step in todo:
        assert all(list(ROOT.glob(pattern)) for pattern in step.files), step.name
    into = {step.command[-1] for step in todo if step.name.startswith("bench ")}
    assert into == {str(results.RESULTS / "a-card" / "card.json")}


def test_suites_that_were_measured_whole_go_into_the_results(tmp_path, monkeypatch):
    env = results.environment(torch.device("cpu"))
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: None)
    measured, file = tmp_path / "measured", results.file_of(tmp_path, "card")
    rows = [Row(asdict(SUITES["cpu"].cases[0]), "tilewise", FORWARD)]
    for suite, partial in (("cpu", False), ("llmc", True)):
        results.merge(results.file_of(measured, "card", "card.json"), suite, rows, env, partial)
    card.documents(measured, tmp_path)
    content = results.load(file)
    assert set(content["suites"]) == {"cpu"}
    assert content["kernels"][env["kernels"]]["cpu"]
    results.merge(file, "cpu", [], env | {"when": "9999"}, False)
    content = results.load(file)
    results.write(file, content | {"kernels": content["kernels"] | {"nobody's": {"cpu": "0"}}})
    card.documents(measured, tmp_path)
    assert results.load(file)["suites"]["cpu"]["rows"] == [], "what is newer stays"
    assert set(results.load(file)["kernels"]) == {env["kernels"]}, "states that no run names are dropped"
