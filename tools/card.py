"""make card: everything that needs a GPU, most valuable first, in minutes, resumed where it stopped.

python tools/card.py --minutes 9    runs what waits
python tools/card.py --list         what has been seen on which GPU at which state of the kernels, and what waits

The steps are values in card_steps.py. What they showed is kept in benchmarks/seen, a file of JSON lines for each GPU. A
line is written at once, so that a run that is cut off has lost nothing: the next one goes on with the tests that are
not there. A step that failed does not stop the rest. It comes last in the next run, which repeats its failures alone.
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
LATE, SILENT = "late", "silent"
LINES = 40
"""Of a command's output, which tell why it failed."""


@dataclass
class Seen:
    """Hold what a step showed at one state of the kernels."""

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
            known = line["record"]
            lists = {name: set(known[name].split()) for name in ("passed", "skipped")}
            self.__dict__.update({**known, **lists})
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
        kept = {name: value for name, value in self.__dict__.items() if name not in ("step", "state", "repeated")}
        return {"step": self.step, "state": self.state, "record": {**kept, **lists}}

    def told(self) -> str:
        """Count the outcomes in words."""
        counts = [f"{len(self.passed)} passed"] * bool(self.passed) + [f"{len(self.skipped)} skipped"] * bool(
            self.skipped
        )
        counts += [f"{len(self.failed)} FAILED"] * bool(self.failed)
        return ", ".join(counts) or "done"


class Log:
    """Keep what one GPU has shown, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[tuple[str, str], Seen]:
        """Return what was seen, by step and state."""
        found: dict[tuple[str, str], Seen] = {}
        for line in card_plugin.lines(self.path):
            at = line["step"], line["state"]
            found.setdefault(at, Seen(*at)).take(line)
        return found

    def add(self, step: Step, state: str, **event: Any) -> None:
        """Append the line of an event."""
        card_plugin.append(self.path, {"step": step.name, "state": state, **event})

    def tidy(self) -> None:
        """Write one line for every step and state in place of their events."""
        lines = [json.dumps(seen.record()) for seen in self.read().values()]
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.path)


def waiting(todo: Sequence[Step], states: dict[str, str], seen: dict[tuple[str, str], Seen]) -> list[Step]:
    """Return the steps to run, in order: those that never ended, then those that failed or whose files have changed."""
    never, again = [], []
    for step in todo:
        known = seen.get((step.name, states[step.name]))
        if known is None or not known.files:
            never.append(step)
        elif known.failed or known.files != step.text():
            again.append(step)
    return never + again


def run(todo: Sequence[Step], states: dict[str, str], log: Log, minutes: float) -> int:
    """Run what waits until the minutes are over; return how many steps have failures at these kernels."""
    end = time.monotonic() + 60.0 * minutes
    for step in waiting(todo, states, log.read()):
        state = states[step.name]
        left = end - time.monotonic()
        if left <= 0:
            print(f"--- {step.name} waits for the next run", flush=True)
            continue
        print(f"--- {step.name}: about {step.minutes:g} minutes, {left / 60:.1f} are left", flush=True)
        log.add(step, state, event="begins")
        known = log.read()[step.name, state]
        begin = time.monotonic()
        code, said = execute(step, state, log, known, end)
        if code is None:
            print(
                f"--- {step.name} was cut off after {time.monotonic() - begin:.0f} s; the next run goes on", flush=True
            )
            continue
        known = log.read()[step.name, state]
        if code not in step.fine and not (code == 1 and set(known.failed) - known.repeated):
            log.add(step, state, test=ITSELF, digest="", outcome="failed", why=f"exit status {code}: {said}"[-4000:])
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        seconds = round(time.monotonic() - begin, 1)
        log.add(step, state, event="ends", files=step.text(), when=now, seconds=seconds)
        log.tidy()
        known = log.read()[step.name, state]
        print(f"--- {step.name}: {known.told()}, in {seconds:.0f} s", *known.failed, sep="\n    ", flush=True)
    seen = log.read()
    return sum(bool(seen[at].failed) for step in todo if (at := (step.name, states[step.name])) in seen)


def execute(step: Step, state: str, log: Log, known: Seen, end: float) -> tuple[int | None, str]:
    """Run a step's command until it ends, the time is over (status None), or it prints nothing for too long. Return its
    exit status and last lines."""
    done = sorted(known.passed | known.skipped)
    again = set(known.failed) - known.repeated
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
    """Print what every GPU has shown, and what waits there."""
    for log in logs:
        seen = log.read()
        due = {step.name for step in waiting(todo, states, seen)}
        print(f"{log.path.stem}:")
        for step in todo:
            known = seen.get((step.name, states[step.name]))
            before = max(
                (s for s in seen.values() if s.step == step.name and s.files), key=lambda s: s.when, default=None
            )
            text = f"{known.told()}, {known.when or 'not to its end'}" if known else "not seen at these kernels"
            if not known and before:
                text += f"; at {before.state}: {before.told()}, {before.when}"
            mark = f"waits, {step.minutes:g} min" if step.name in due else "seen"
            print(f"  {mark:14} {step.name:32} kernels {states[step.name]}  {text}")
            for name in (known or Seen("", "")).failed:
                print(f"{'':17}FAILED {name}")


def documents(seen: Path, folder: Path = ROOT / "benchmarks" / "results") -> None:
    """Put suites that were measured whole into the results, unless those are newer, and draw everything."""
    for file in sorted((seen / "results").glob("*.json")):
        content, kept = results.load(file), results.load(folder / file.name)
        kept["device"] = content["device"]
        for name, run in content["suites"].items():
            env, before = run["environment"], kept["suites"].get(name, {"environment": {"when": ""}})
            if not run["partial"] and env["when"] > before["environment"]["when"]:
                kept["suites"][name] = run
                kept.setdefault("kernels", {})[env["kernels"]] = content["kernels"][env["kernels"]]
                print(f"{name} is now in {folder / file.name}")
        results.write(folder / file.name, kept)
    for script in ("tools/report.py", "docs/pictures/draw.py"):
        subprocess.run([sys.executable, str(ROOT / script)], cwd=ROOT, check=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument("--list", action="store_true", help="only show what has been seen and what waits")
    parser.add_argument("--seen", type=Path, default=ROOT / "benchmarks" / "seen", help="the folder that is kept")
    parser.add_argument("--match", default="", help="only steps with this in their name")
    parser.add_argument("--documents", action="store_true", help="only put measured suites into the results, and draw")
    given = parser.parse_args()
    if given.documents:
        documents(given.seen)
        return 0
    todo = [step for step in steps(given.seen.resolve()) if given.match in step.name]
    states = {step.name: step.state() for step in todo}
    here = [results.slug(torch.cuda.get_device_name())] if torch.cuda.is_available() else []
    if given.list:
        names = dict.fromkeys([*here, *(path.stem for path in sorted(given.seen.glob("*.jsonl")))]) or ["no GPU yet"]
        show(todo, states, [Log(given.seen / f"{name}.jsonl") for name in names])
        return 0
    if not here:
        print("make card needs a GPU, and PyTorch sees none here; `make card ARGS=--list` shows what waits")
        return 1
    log = Log(given.seen.resolve() / f"{here[0]}.jsonl")
    bad = run(todo, states, log, given.minutes)
    show(todo, states, [log])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
