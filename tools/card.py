"""make card: everything that needs a GPU, most valuable first, in minutes, resumed where it stopped.

python tools/card.py --minutes 9    runs what waits
python tools/card.py --list         what has run on which GPU at which state of the kernels, and what waits

The steps are values in card_steps.py. Their outcomes are saved in benchmarks/results/GPU/steps.jsonl. A line is written
at once, so that a run that is cut off has lost nothing: the next one goes on with the tests that are not there. A
step that failed does not stop the rest. It comes last in the next run, which repeats its failures alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import card_plugin
import torch
from card_steps import ROOT, Step, steps

from studies.bench import results

ITSELF = "the step itself"
"""Stands for a test where a command failed that names none."""
STEPS = "steps.jsonl"
"""The file of a GPU's outcomes."""
LATE, SILENT = "late", "silent"
LINES = 40
"""Of a command's output, which tell why it failed."""


@dataclass
class Outcome:
    """What came of a step at one state of the kernels."""

    step: str
    state: str
    passed: set[str] = field(default_factory=set)
    """Tests by `card_plugin.digest`: a name, and the text of its file."""
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Names, and why."""
    files: str = ""
    """The step's own files when it ended; "" if it never did."""
    when: str = ""
    seconds: float = 0.0
    repeated: set[str] = field(default_factory=set)
    """Failures from before that this run has not come to yet."""

    def take(self, line: dict[str, Any]) -> None:
        """Take in one line of the file: a step's whole record, or an event."""
        if "record" in line:
            record = line["record"]
            lists = {name: set(record[name].split()) for name in ("passed", "skipped")}
            self.__dict__.update({**record, **lists})
        elif "test" in line:
            self._take_test(**{name: line[name] for name in ("test", "digest", "outcome", "why")})
        elif line["event"] == "begins":
            if self.files:
                self.files, self.repeated = "", set(self.failed)
        elif line["event"] == "ends":
            self.failed = {name: why for name, why in self.failed.items() if name not in self.repeated}
            self.files, self.when, self.repeated = line["files"], line["when"], set()
            self.seconds += line["seconds"]

    def _take_test(self, test: str, digest: str, outcome: str, why: str) -> None:
        if outcome == "failed":
            if test in self.repeated or test not in self.failed:
                self.failed[test] = why
            self.passed.discard(digest)
        else:
            self.failed.pop(test, None)
            (self.passed if outcome == "passed" else self.skipped).add(digest)
        self.repeated.discard(test)

    def record(self) -> dict[str, Any]:
        """Return it as a line of the file."""
        lists = {name: " ".join(sorted(getattr(self, name))) for name in ("passed", "skipped")}
        saved = {name: value for name, value in self.__dict__.items() if name not in ("step", "state", "repeated")}
        return {"step": self.step, "state": self.state, "record": {**saved, **lists}}

    def in_words(self) -> str:
        """Count the outcomes in words."""
        counts = [f"{len(self.passed)} passed"] * bool(self.passed) + [f"{len(self.skipped)} skipped"] * bool(
            self.skipped
        )
        counts += [f"{len(self.failed)} FAILED"] * bool(self.failed)
        return ", ".join(counts) or "done"


class Log:
    """Save the outcomes of one GPU, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[tuple[str, str], Outcome]:
        """Return the outcomes, by step and state."""
        found: dict[tuple[str, str], Outcome] = {}
        for line in card_plugin.lines(self.path):
            at = line["step"], line["state"]
            found.setdefault(at, Outcome(*at)).take(line)
        return found

    def add(self, step: Step, state: str, **event: Any) -> None:
        """Append the line of an event."""
        card_plugin.append(self.path, {"step": step.name, "state": state, **event})

    def tidy(self) -> None:
        """Write one line for every step and state in place of their events."""
        lines = [json.dumps(outcome.record()) for outcome in self.read().values()]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.path)


def waiting(todo: Sequence[Step], states: dict[str, str], outcomes: dict[tuple[str, str], Outcome]) -> list[Step]:
    """Return the steps to run, in order: those that never ended, then those that failed or whose files have changed."""
    never, again = [], []
    for step in todo:
        outcome = outcomes.get((step.name, states[step.name]))
        if outcome is None or not outcome.files:
            never.append(step)
        elif outcome.failed or outcome.files != step.text():
            again.append(step)
    return never + again


def run(todo: Sequence[Step], states: dict[str, str], log: Log, minutes: float) -> int:
    """Run what waits until the minutes are over; return how many steps have failures at these kernels."""
    end = time.monotonic() + 60.0 * minutes
    log.path.parent.mkdir(parents=True, exist_ok=True)
    for step in waiting(todo, states, log.read()):
        state = states[step.name]
        left = end - time.monotonic()
        if left <= 0:
            print(f"--- {step.name} waits for the next run", flush=True)
            continue
        print(f"--- {step.name}: about {step.minutes:g} minutes, {left / 60:.1f} are left", flush=True)
        log.add(step, state, event="begins")
        before = log.read()[step.name, state]
        begin = time.monotonic()
        code, said = execute(step, state, log, before, end)
        if code is None:
            print(
                f"--- {step.name} was cut off after {time.monotonic() - begin:.0f} s; the next run goes on", flush=True
            )
            continue
        outcome = log.read()[step.name, state]
        if code not in step.fine and not (code == 1 and set(outcome.failed) - outcome.repeated):
            log.add(step, state, test=ITSELF, digest="", outcome="failed", why=f"exit status {code}: {said}"[-4000:])
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        seconds = round(time.monotonic() - begin, 1)
        log.add(step, state, event="ends", files=step.text(), when=now, seconds=seconds)
        log.tidy()
        outcome = log.read()[step.name, state]
        print(f"--- {step.name}: {outcome.in_words()}, in {seconds:.0f} s", *outcome.failed, sep="\n    ", flush=True)
    outcomes = log.read()
    return sum(bool(outcomes[at].failed) for step in todo if (at := (step.name, states[step.name])) in outcomes)


def execute(step: Step, state: str, log: Log, before: Outcome, end: float) -> tuple[int | None, str]:
    """Run a step's command until it ends, the time is over (status None), or it prints nothing for too long. Return its
    exit status and last lines."""
    done = sorted(before.passed | before.skipped)
    again = set(before.failed) - before.repeated
    plan = {"log": str(log.path), "step": step.name, "state": state, "done": done, "failed": sorted(again)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", card_plugin.PLAN: json.dumps(plan)}
    with subprocess.Popen(
        [sys.executable, *step.command], cwd=step.folder, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        tail: deque[bytes] = deque(maxlen=LINES)
        listener = threading.Thread(target=listen, args=(process, tail), daemon=True)
        listener.start()
        stopped = watch(process, log, tail, end, 60.0 * step.silence)
        listener.join(5.0)
    if stopped == SILENT:
        for test in card_plugin.unfinished(log.path, step.name, state):
            log.add(step, state, test=test, digest="", outcome="failed", why=f"{SILENT} for {step.silence:g} minutes")
    return None if stopped == LATE else process.returncode, b"".join(tail).decode(errors="replace")


def listen(process: subprocess.Popen[bytes], tail: deque[bytes]) -> None:
    """Print what a process prints, and keep the last lines."""
    for line in process.stdout or ():
        tail.append(line)
        print(line.decode(errors="replace"), end="", flush=True)


def watch(process: subprocess.Popen[bytes], log: Log, tail: deque[bytes], end: float, silence: float) -> str | None:
    """Wait for a process; kill it and all that it started when the time is over or it prints nothing for too long."""
    heard, sign = time.monotonic(), None
    while process.poll() is None:
        time.sleep(0.1)
        now, before = time.monotonic(), sign
        sign = len(tail), id(tail[-1]) if tail else 0, log.path.stat().st_size
        heard = heard if sign == before else now
        if now > end or now - heard > silence:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return LATE if now > end else SILENT
    return None


def show(todo: Sequence[Step], states: dict[str, str], logs: Iterable[Log]) -> None:
    """Print the outcomes of every GPU, and what waits there."""
    for log in logs:
        outcomes = log.read()
        due = {step.name for step in waiting(todo, states, outcomes)}
        print(f"{log.path.parent.name}:")
        for step in todo:
            outcome = outcomes.get((step.name, states[step.name]))
            if outcome:
                text = f"{outcome.in_words()}, {outcome.when or 'not to its end'}"
            else:
                text = "not seen at these kernels"
                ended = [each for each in outcomes.values() if each.step == step.name and each.files]
                if ended:
                    last = max(ended, key=lambda each: each.when)
                    text += f"; at {last.state}: {last.in_words()}, {last.when}"
            mark = f"waits, {step.minutes:g} min" if step.name in due else "seen"
            print(f"  {mark:14} {step.name:32} kernels {states[step.name]}  {text}")
            for name in outcome.failed if outcome else ():
                print(f"{'':17}FAILED {name}")


def documents(folder: Path, into: Path = results.RESULTS) -> None:
    """Put suites that were measured whole into bench.json, unless those there are newer, and draw everything."""
    for file in sorted(folder.glob("*/card.json")):
        to = results.file_of(into, file.parent.name)
        content, merged = results.load(file), results.load(to)
        merged["device"] = content["device"]
        for name, run in content["suites"].items():
            env, before = run["environment"], merged["suites"].get(name, {"environment": {"when": ""}})
            if not run["partial"] and env["when"] > before["environment"]["when"]:
                merged["suites"][name] = run
                merged.setdefault("kernels", {})[env["kernels"]] = content["kernels"][env["kernels"]]
                print(f"{name} is now in {to}")
        results.drop_states(merged)
        results.write(to, merged)
    for script in ("tools/report.py", "docs/pictures/draw.py"):
        subprocess.run([sys.executable, str(ROOT / script)], cwd=ROOT, check=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument("--list", action="store_true", help="only show what has run and what waits")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="a folder with a folder for each GPU")
    parser.add_argument("--match", default="", help="only steps with this in their name")
    parser.add_argument("--documents", action="store_true", help="only put measured suites into the results, and draw")
    given = parser.parse_args()
    folder = given.results.resolve()
    if given.documents:
        documents(folder)
        return 0
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    todo = [step for step in steps(folder, here) if given.match in step.name]
    states = {step.name: step.state() for step in todo}
    mine = [results.file_of(folder, here, STEPS)] if here else []
    if given.list:
        files = dict.fromkeys([*mine, *sorted(folder.glob(f"*/{STEPS}"))])
        show(todo, states, map(Log, files or [folder / "no GPU yet" / STEPS]))
        return 0
    if not mine:
        print("make card needs a GPU, and PyTorch sees none here; `make card ARGS=--list` shows what waits")
        return 1
    log = Log(*mine)
    bad = run(todo, states, log, given.minutes)
    show(todo, states, [log])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
