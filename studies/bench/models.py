"""Training steps of whole models: python -m studies bench --suite models --results benchmarks/results

Each of MODELS makes its step, forward, loss and backward without an optimizer, on tilewise and on PyTorch's attentions,
eager and under torch.compile. A contender has a process of its own, because torch.compile and SDPA's settings belong to
a process. Contenders of two models make their first steps side by side; then they take turns, and all but one wait.
Medians count, with the CPU's time where a GPU waits for it, as in a training.

The first step's loss and the norms of all gradients are compared with those of the first of PyTorch's contenders: who
is off by more than rounding is not timed. A row is saved at once, and a later run on the same kernels, programs and
versions goes on behind it. The table says whether tilewise is at least as fast as the fastest of PyTorch's attentions.
Without a GPU there is a rehearsal with small models: --device cpu --quick.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

import tilewise as tw

from .. import ROOT
from . import results
from .engine import excuse
from .measure import spread, synchronize
from .steps import MODELS, OURS, Model, context

FILES = ("studies/bench/models.py", "studies/bench/steps.py", "src/tilewise/compat/**/*.py")
"""What a row depends on beside kernels and versions."""
EAGER, COMPILED = "eager", "compiled"
MODES = (EAGER, COMPILED)
COMPILER = {"cuda": "inductor", "cpu": "aot_eager"}
"""A rehearsal traces as a GPU's run does, and generates no code."""
BAR = 1.0
"""The least ratio of times, that of PyTorch's fastest attention over ours."""
OFF_LOSS, OFF_NORM = 2.0**-7, 2.0**-4
"""The largest difference of the loss, and of a gradient's norm, as shares. bf16 rounds to 2^-9 of a number; a loss is a
mean, whose roundings cancel, so two units in the last place are far more than it errs. A gradient sums the roundings of
all layers."""
LEAST = 1e-3
"""Share of the largest norm: smaller gradients, 0 but for rounding like that of a bias of K, are compared with it."""
ROUNDS = {"cuda": 15, "cpu": 2}
WARM, SAMPLE = 0.06, 0.12
"""Seconds for which a contender runs before each of its samples, and at least in it."""
PREPARE, TURN = 280.0, 60.0
"""Seconds after which a process is ended that has not made its first step, or taken its turn."""
AT_ONCE = 2
"""Models whose contenders make their first steps side by side on a GPU, all of which its memory must hold."""
THREADS = "2"
"""Of the compiler of each contender."""


class Step:
    """A contender: a model with an attention, and how it makes a step."""

    def __init__(self, model: Model, peer: str, device: torch.device, small: bool) -> None:
        torch.manual_seed(0)
        self.peer, self.device, self.inputs = peer, device, model.inputs(small, device)
        with device:
            self.module = model.make(small, peer).train()
        torch.compiler.config.cache_key_tag += f";{peer}"  # type: ignore[attr-defined]  # graphs of SDPA look alike
        compiled = torch.compile(self.module, dynamic=False, backend=COMPILER[device.type])
        self.forwards: dict[str, Any] = {EAGER: self.module, COMPILED: compiled}

    def run(self, mode: str) -> torch.Tensor:
        """Make a step, and return its loss."""
        self.module.zero_grad(set_to_none=True)
        with context(self.peer):
            loss = self.forwards[mode](**self.inputs)["loss"]
            loss.backward()
        return loss.detach()

    def check(self, mode: str) -> dict[str, Any]:
        """Make the first step, and return its loss and the gradients' norms."""
        with tw.count_calls() as calls:
            loss = float(self.run(mode))
        if self.peer == OURS and not calls.ran.total():
            raise RuntimeError("no call of attention came to tilewise; this release of the model's package may be old")
        norms = [float(p.grad.float().norm()) for p in self.module.parameters() if p.grad is not None]
        return {"loss": loss, "norms": norms}

    def sample(self, mode: str, warm: float, least: float) -> float:
        """Return the milliseconds of a step, from one measurement of several."""
        began, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - began < warm:
            self.run(mode)
            synchronize(self.device)
            steps += 1
        count = max(1, round(least * steps / (time.perf_counter() - began)))
        if self.device.type == "cpu":
            return 1e3 * _seconds(lambda: self.run(mode), count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            self.run(mode)
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / count


def _seconds(call: Any, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def serve(pipe: Any, name: str, peer: str, device: torch.device, small: bool) -> None:
    """Be a contender's process: answer requests, the name of a method with its arguments, until there are no more."""
    warnings.simplefilter("ignore")  # of compilers, and of FlexAttention that is not compiled
    step = None
    while (request := received(pipe)) is not None:
        method, *arguments = request
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                step = step or Step(MODELS[name], peer, device, small)
                answer = getattr(step, method)(*arguments), None
            except Exception as error:
                answer = None, excuse(error, heard)[1]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the memory of a step is the next one's
        pipe.send(answer)


def received(pipe: Any) -> Any:
    """Return a request, or None where the process that sent them has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return None


class Contender:
    """A contender's process, as the process sees it that gives turns."""

    def __init__(self, *given: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, other = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(other, *given), daemon=False)
        self.process.start()
        other.close()

    def ask(self, *request: Any) -> None:
        """Send a request, a method's name and its arguments; nothing ends the process."""
        if self.process.is_alive():
            self.pipe.send(request or None)

    def answer(self, seconds: float) -> tuple[Any, str | None]:
        """Return what it answers, or None and why there is nothing."""
        try:
            if self.pipe.poll(max(0.0, seconds)):
                return self.pipe.recv()
        except (EOFError, OSError):
            return None, "its process died"
        self.process.kill()
        return None, "it was cut off after its time limit"

    def end(self) -> None:
        """End the process, and wait for that."""
        self.ask()
        self.process.join(10)
        self.process.kill()
        self.process.join()


class Contest:
    """All contenders of a model."""

    def __init__(self, model: Model, device: torch.device, small: bool) -> None:
        self.model, self.device, self.small = model, device, small
        self.contenders = {peer: Contender(model.name, peer, device, small) for peer in (OURS, *model.peers)}
        self.checked: dict[str, dict[str, Any]] = {}
        self.why: dict[str, str] = {}

    def prepare(self, mode: str) -> None:
        """Ask every contender for its first step."""
        for each in self.contenders.values():
            each.ask("check", mode)

    def gather(self, until: float) -> None:
        """Take the answers."""
        answers = {peer: each.answer(until - time.monotonic()) for peer, each in self.contenders.items()}
        self.checked = {peer: found for peer, (found, why) in answers.items() if why is None}
        self.why = {peer: why for peer, (_, why) in answers.items() if why is not None}

    def row(self, mode: str) -> dict[str, Any]:
        """Let the contenders that are right take turns, and return a row."""
        checked, why = self.checked, self.why
        true = next((checked[peer] for peer in self.model.peers if peer in checked), None)
        off = {} if true is None else {peer: differences(found, true) for peer, found in checked.items()}
        wrong = [peer for peer, each in off.items() if not (each["loss"] <= OFF_LOSS and each["norms"] <= OFF_NORM)]
        why |= dict.fromkeys(wrong, "its loss or gradients differ, so not timed")
        samples: dict[str, list[float]] = {peer: [] for peer in off if peer not in wrong}
        for turn in range(ROUNDS[self.device.type]):
            for peer in Random(turn).sample([*samples], len(samples)):
                if peer not in why:
                    self.contenders[peer].ask("sample", mode, WARM, SAMPLE)
                    found, no = self.contenders[peer].answer(TURN)
                    why |= {} if no is None else {peer: no}
                    samples[peer] += [] if no else [found]
        times = {peer: spread(found)[1] for peer, found in samples.items() if peer not in why}
        batch, length = self.model.size(self.small)
        return {
            "model": self.model.name, "size": f"{batch} x {length}", "mode": mode, "milliseconds": times,
            "tokens": {peer: 1e3 * batch * length / each for peer, each in times.items()},
            "losses": {peer: found["loss"] for peer, found in checked.items()}, "off": off, "why": why,
            **judged(times),
        }  # fmt: skip


def differences(found: dict[str, Any], true: dict[str, Any]) -> dict[str, float]:
    """Return how far a loss and the gradients' norms are off, as shares; a nan, or another number of them, is inf."""
    a, b = (torch.tensor([each["loss"], *each["norms"]], dtype=torch.float64) for each in (found, true))
    if len(a) != len(b) or not a.isfinite().all():
        return {"loss": float("inf"), "norms": float("inf")}
    norms = (a[1:] - b[1:]).abs() / b[1:].clamp(min=LEAST * b[1:].max())
    return {"loss": float((a[0] - b[0]).abs() / b[0].abs()), "norms": float(norms.max())}


def judged(times: dict[str, float]) -> dict[str, Any]:
    """Return the fastest of PyTorch's attentions and its time over ours, None where one of both has no time."""
    theirs = {peer: each for peer, each in times.items() if peer != OURS}
    than = min(theirs, key=lambda peer: theirs[peer], default=None)
    return {"than": than, "ratio": theirs[than] / times[OURS] if than and OURS in times else None}


def rows_of(models: list[Model], done: set[tuple[str, str]], device: torch.device, small: bool) -> Iterator[dict]:
    """Measure some models' rows that are not done, whose contenders prepare side by side."""
    todo = {model.name: [mode for mode in MODES if (model.name, mode) not in done] for model in models}
    contests = [Contest(model, device, small) for model in models if todo[model.name]]
    try:
        for mode in MODES:
            mine = [contest for contest in contests if mode in todo[contest.model.name]]
            for contest in mine:
                contest.prepare(mode)
            until = time.monotonic() + PREPARE
            for contest in mine:
                contest.gather(until)
            for contest in mine:
                yield contest.row(mode)
    finally:
        for each in (each for contest in contests for each in contest.contenders.values()):
            each.end()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each row, and how many bars hold in each mode."""
    lines = []
    for row in rows:
        what = f"{row['model']}, {row['size']}, {row['mode']}"
        if row["ratio"] is None:
            said = "; ".join(f"{who}: {why}" for who, why in row["why"].items())
            lines.append(f"{what:<44} not measured: {said}")
            continue
        times = ", ".join(f"{peer} {each:.2f} ms" for peer, each in row["milliseconds"].items())
        said = "holds" if row["ratio"] >= BAR else "MISSED"
        rate = f"{row['tokens'][OURS] / 1e3:.0f}k tokens/s"
        lines.append(f"{what:<44} {row['ratio']:.3f} of {row['than']}, at least {BAR}: {said}; {rate}; {times}")
    for mode in MODES:
        mine = [row["ratio"] for row in rows if row["mode"] == mode and row["ratio"] is not None]
        lines.append(f"{mode}: {sum(ratio >= BAR for ratio in mine)} of {len(mine)} bars hold")
    return lines


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return what identifies a measurement: that of other results, a hash of FILES, and the clients' versions."""
    texts = [path.read_bytes() for pattern in FILES for path in sorted(ROOT.glob(pattern))]
    clients = {model.client for model in MODELS.values() if not missing(model)}
    return results.environment(device) | {
        "programs": hashlib.sha256(b"".join(texts)).hexdigest()[:12],
        "clients": {name: importlib.metadata.version(name) for name in sorted(clients)},
    }


def missing(model: Model) -> str | None:
    """Return why a model cannot be made here."""
    found = importlib.util.find_spec(model.client)
    return None if found else f"{model.client} is not installed; install tilewise[integrations]"


def saved(path: Path, env: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a file's rows, if they are of the same kernels, programs and versions."""
    content: Any = results.unpacked(json.loads(path.read_text())) if path.exists() else {"environment": {}}
    identity = ("device", "kernels", "programs", "versions", "clients")
    return content["rows"] if all(content["environment"].get(name) == env[name] for name in identity) else []


def measure(path: Path | None, names: list[str], device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Measure what is missing of some models, and keep each row at once. Return these models' rows."""
    env = environment_of(device)
    size = {name: MODELS[name].size(small) for name in MODELS}
    before = saved(path, env) if path else []
    rows = [row for row in before if row["model"] not in names or row["ratio"] is not None]
    done = {(row["model"], row["mode"]) for row in rows if row["size"] == "{} x {}".format(*size[row["model"]])}
    here = [MODELS[name] for name in names if not missing(MODELS[name])]
    at_once = AT_ONCE if device.type == "cuda" else 1
    found = (rows_of(here[i : i + at_once], done, device, small) for i in range(0, len(here), at_once))
    skipped = (
        {"model": name, "size": "", "mode": mode, "milliseconds": {}, "why": {name: why}, "ratio": None}
        for name in names if (why := missing(MODELS[name])) for mode in MODES
    )  # fmt: skip
    for row in itertools.chain(skipped, itertools.chain.from_iterable(found)):
        rows.append(row)
        print(*table([row])[:1], flush=True)
        if path:
            content = {"device": env["device"], "environment": env, "rows": rows}
            results.save_states(content, [env])
            results.write(path, content)
    return [row for row in rows if row["model"] in names]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 if tilewise made no step of some model that is here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="write <device name>/models.json in this folder, and resume it")
    parser.add_argument("--model", action="append", choices=MODELS, help="measure this one alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small models")
    given = parser.parse_args(arguments)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", THREADS)
    device = torch.device(given.device)
    if device.type == "cpu" and not given.quick:
        parser.error("the device of suite models must be cuda, got cpu; pass --quick for a rehearsal")
    path = results.file_of(given.results, results.device_name(device), "models.json") if given.results else None
    rows = measure(path, given.model or [*MODELS], device, given.quick)
    print("\n".join(table(rows)))
    return int(any(row["size"] and OURS not in row["milliseconds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
