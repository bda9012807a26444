"""python tools/versions.py HEAD~1 . --match causal --peer "window 1024": times versions of the package in turns.

A version is a git revision, or a folder that holds src/tilewise. Each has its own process, which keeps its kernels
and inputs. One works at a time, round after round, and each round another one first: a power-limited card is faster for
whoever comes after a pause.
"""

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parents[1]))
from studies.bench.command import part, suites_for
from studies.bench.peers import PEERS
from studies.bench.suites import SUITES, Case
from studies.console import err, out, progress, sentences, table
from studies.options import pick_device

ROOT = Path(__file__).parents[1]
SERVED = Path(__file__).with_name("served.py")
"""What the process of a version runs."""


@contextmanager
def source(version: str, *folders: str) -> Iterator[Path]:
    """Yield the src folder of a version: a folder's own, or a revision's in a temporary folder. Next to it lie the
    other folders that are named, and the revision's studies, if it has any."""
    if (Path(version) / "src" / "tilewise").is_dir():
        yield Path(version).resolve() / "src"
        return
    git = ["git", "-C", str(ROOT)]
    studies = subprocess.run([*git, "cat-file", "-e", f"{version}:studies"], capture_output=True, check=False)
    given = ("src", *folders, *(() if studies.returncode else ("studies",)))
    archive = subprocess.run([*git, "archive", version, *given], capture_output=True, check=False)
    if archive.returncode:
        raise ValueError(f"{version!r} is neither a folder that holds src/tilewise nor a revision of {ROOT}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder) / "src"


@contextmanager
def started(version: str) -> Iterator[subprocess.Popen[str]]:
    """Start the process of a version."""
    with source(version) as src:
        home = src.parent if (src.parent / "studies" / "bench").is_dir() else ROOT
        path = os.pathsep.join([str(src), str(home), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, str(SERVED)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as process:
            yield process
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]


def ask(process: subprocess.Popen[str], question: dict[str, Any]) -> None:
    """Put a question to a version; `heard` tells if it has ended."""
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read its answer."""
    line = process.stdout.readline()  # type: ignore[union-attr]
    return json.loads(line) if line else {"why": "its process has ended"}


def race(processes: Sequence[subprocess.Popen[str]], question: dict[str, Any], rounds: int) -> list[list[float] | str]:
    """Return the seconds of every version by round, or why there are none."""
    for process in processes:  # all compile at once; these times do not count
        ask(process, question)
    found: list[list[float] | str] = [answer.get("why") or [] for answer in map(heard, processes)]
    for turn in range(rounds):
        for n in range(len(processes)):
            index = (turn + n) % len(processes)
            if isinstance(times := found[index], list):
                ask(processes[index], question)
                answer = heard(processes[index])
                if "why" in answer:
                    found[index] = answer["why"]
                else:
                    times.append(answer["seconds"])
    return found


def cells(found: Sequence[list[float] | str]) -> list[str]:
    """Format each version's milliseconds, and its speed relative to the first in the same rounds."""
    first, shown = found[0], []
    for times in found:
        if isinstance(times, str):
            shown += ["-", "-"]
            continue
        ratio = isinstance(first, list) and statistics.median(a / b for a, b in zip(first, times, strict=True))
        shown += [f"{1e3 * statistics.median(times):.4f}", f"{ratio:.3f}" if ratio else "-"]
    return shown


def versions(
    version: Annotated[list[str], typer.Argument(help="Git revisions, or folders that hold src/tilewise.")],
    suite: Annotated[str | None, typer.Option(help=f"One of: {', '.join(SUITES)}.")] = None,
    match: Annotated[list[str] | None, typer.Option(help="Only cases with this in their name: causal, D128.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="What to time; tilewise if left out.")] = None,
    rounds: Annotated[int, typer.Option(help="Of all versions.", min=1)] = 15,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Time versions of tilewise in turns, and compare them with the first."""
    with sentences(), ExitStack() as stack:
        where = pick_device(device)
        (whole,) = suites_for([suite or ("variants" if where.type == "cuda" else "cpu")], where)
        chosen = part(whole, match or [], peer or ["tilewise"])
        processes = [stack.enter_context(started(name)) for name in version]
        questions = [
            {"case": asdict(case), "peer": name, "pass": pass_, "device": str(where)}
            for case in chosen.cases for name in chosen.peers for pass_ in chosen.passes
            if PEERS[name].why_not(case, where) is None
        ]  # fmt: skip
        lines, excuses = [], []
        with progress("now") as bar:
            task = bar.add_task(chosen.name, total=len(questions), now="")
            for question in questions:
                title = f"{Case(**question['case'])}, {question['peer']}, {question['pass']}"
                bar.update(task, now=title)
                found = race(processes, question, rounds)
                lines.append([title, *cells(found)])
                named = zip(version, found, strict=True)
                excuses += [f"{name}, {title}: {why}" for name, why in named if isinstance(why, str)]
                bar.advance(task)
    table("milliseconds, and speed over the first's", ["", *(s for name in version for s in (name, "speed"))], lines)
    for line in excuses:
        err.print(f"not timed: {line}", markup=False)
    out.print(f"Medians of {rounds} rounds, in which all versions took turns.", style="dim")


if __name__ == "__main__":
    typer.run(versions)
