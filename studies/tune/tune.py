"""Measures the rows of the tables of tiles, and their neighbours, on this card. `python -m studies tune` drives it.

A slot is a row's place in a table, with the cases whose calls read it. Its candidates are compiled in parallel, judged
by the benchmark's rule, and timed in turns, round after round: the whole forward, or the whole backward.
"""

import importlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from tilewise.call.backend import Pass, load
from tilewise.call.check import describe, describe_fake
from tilewise.call.operands import Operands, Saved
from tilewise.call.problem import Problem, matmul_setting, target_of
from tilewise.call.recipe import Recipe
from tilewise.host.tables import label
from tilewise.values.products import PRECISIONS, products_of

from ..bench.accuracy import NAMES, Inputs, Truth
from ..bench.engine import Watch
from ..bench.measure import Pace, pace, sample, spread, synchronize
from ..bench.peers import SEED
from ..bench.results import FAILED, OK, SKIPPED, WRONG
from ..bench.suites import BACKWARD, FORWARD, Case
from . import rows
from .tuned import Candidate, Tuned

BACKENDS = ("hopper", "triton")
ROUNDS, QUICK_ROUNDS = 5, 3
SHORT, PLAIN = 128, {64: (32, 64, 256), 128: (32, 64)}
"""Lengths at which Hopper's forward or the portable backward reads rows for short calls: one with a mask, and those
without by head size."""
IN_PIECES = (96, ""), (160, ""), (192, ""), (224, ""), (192, "values of 128")
"""Head sizes whose rows lie in pieces on Hopper, with the variant of a case."""
WORKERS = min(16, os.cpu_count() or 1)
"""Compilations side by side; each holds the results of one call."""
Trial = tuple[Any, Candidate]
"""A row as its table has it, and as the file does."""


class Slot(NamedTuple):
    """One row of a table, and the cases that read it."""

    backend: str
    table: str
    key: Any
    title: str
    cases: tuple[Case, ...]

    @property
    def pass_(self) -> str:
        """Return the pass that is timed."""
        return FORWARD if self.table == "forward" else BACKWARD

    @property
    def precision(self) -> str | None:
        """Return the precision of a call that reads the row."""
        return next((name for name in PRECISIONS if isinstance(self.key, tuple) and name in self.key), None)

    @property
    def words(self) -> set[str]:
        """Return the words of the name, which --match looks for."""
        return {self.pass_, *self.title.split()}


class Call:
    """A case as a back end takes it, which is named, so that small calls reach it, too."""

    def __init__(self, backend: str, case: Case, x: Inputs, precision: str | None = None) -> None:
        self.launch, self.tiles = _module(backend, "launch"), _module(backend, "tiles")
        self.planned = _module(backend, "plan").planned
        self.x = Operands(x.q.detach(), x.k.detach(), x.v.detach(), ())
        self.do = x.do
        self.seed = torch.full((), SEED, dtype=torch.int64, device=x.q.device) if case.dropout else None
        self.p = describe(self.x, _recipe(backend, case, precision), (0, 0))
        self.differentiable = len(self.tiles.keys(self.p)) > 1
        """Whether the back end has rows for a backward, too."""

    def plan(self, table: str, row: Any) -> Any:
        """Return the plan with this row in place of the one in use."""
        return self.planned(self.p, self.tiles.current(self.p)._replace(**{table: row}))

    def forward(self, plan: Any) -> Saved:
        """Run one forward."""
        return self.launch.forward(self.p, plan, self.x, self.seed)

    def backward(self, plan: Any, saved: Saved) -> Any:
        """Run one backward."""
        return self.launch.backward(self.p, plan, self.x, saved, self.do, None)

    def timed(self, plan: Any, pass_: str) -> Callable[[], Any]:
        """Return the call that a pass repeats."""
        if pass_ == FORWARD:
            return lambda: self.forward(plan)
        saved = self.forward(plan)
        return lambda: self.backward(plan, saved)


def cases(device: torch.device, quick: bool = False) -> list[Case]:
    """Return cases for each type and head size: full and causal masks on a short and a long length, and dropout for the
    rows that only such calls read. 16-bit types up to head size 128 have some shorter ones, too. Rows in pieces have
    long ones alone, and with `quick` the others long full and short causal ones."""
    half = "bf16" if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    found = []
    for dtype, tokens, short, long in ((half, 16384, 1024, 8192), ("fp32", 4096, 1024, 4096)):
        for D in (64, 128, 256, 512):
            plain = [
                Case(tokens // length, 2048 // D, length, D, dtype, causal)
                for length, causal in ((long, False), (short, True), (short, False), (long, True))
            ]
            found += [*plain[: 2 if quick else 4], replace(plain[1], dropout=0.1)]
            if D <= 128 and dtype == half:
                found.append(Case(tokens // SHORT, 2048 // D, SHORT, D, dtype, causal=True))
                found += [Case(tokens // length, 2048 // D, length, D, dtype) for length in PLAIN[D]]
    for D, variant in IN_PIECES:
        found += [Case(2, 2048 // D, 8192, D, half, causal, variant=variant) for causal in (True, False)]
    found.append(Case(2, 2048 // 192, 8192, 192, half, causal=True, dropout=0.1))
    return found


def slots(device: torch.device, given: Sequence[Case]) -> list[Slot]:
    """Return every row that one of the cases reads on this device."""
    found: dict[tuple[str, str, Any], list[Case]] = {}
    for backend in BACKENDS:
        for case, precision in product(given, (None, *PRECISIONS)):
            if precision and case.dtype != "fp32":
                continue
            p = _problem(backend, case, device, precision)
            if not load(backend).why_not(p, Pass.FORWARD):
                for table, key in _module(backend, "tiles").keys(p).items():
                    readers = found.setdefault((backend, table, key), [])
                    readers += [] if case in readers else [case]
    made = []
    for (backend, table, key), readers in found.items():
        plain = [case for case in readers if not case.dropout]
        title = f"{backend} {table} {rows.title(key)}"
        made.append(Slot(backend, table, key, title, tuple(plain or readers)))
    return made


def neighbours(slot: Slot, device: torch.device) -> list[Any]:
    """Return the row in use, then those of its table's neighbourhood."""
    tiles = _module(slot.backend, "tiles")
    row = getattr(tiles.current(_problem(slot.backend, slot.cases[0], device, slot.precision)), slot.table)
    return [row, *rows.neighbours(row)]


def tune(
    given: Sequence[Slot], device: torch.device, seconds: float | None, rounds: int, watch: Watch = lambda text: None
) -> Iterator[Tuned]:
    """One slot after another. Those that would begin after `seconds` are skipped, and say so."""
    begin = time.monotonic()
    for slot in given:
        trials = [(row, Candidate(row._asdict())) for row in neighbours(slot, device)]
        if seconds is not None and time.monotonic() - begin > seconds:
            for _, candidate in trials:
                candidate.status, candidate.why = SKIPPED, f"the time budget of {seconds:g} s was spent"
        else:
            _measure(slot, trials, device, rounds, watch)
        candidates = [candidate for _, candidate in trials]
        names = slot.backend, slot.table, label(slot.key), slot.title, slot.pass_
        yield Tuned(*names, [asdict(case) for case in slot.cases], candidates)


def _measure(slot: Slot, trials: Sequence[Trial], device: torch.device, rounds: int, watch: Watch) -> None:
    if device.type == "cuda":
        watch(f"{slot.title}: compiling {len(trials)} rows")
        _compile(slot, trials, device)
    for case in slot.cases:
        x = Inputs.random(case, device)
        call = Call(slot.backend, case, x, slot.precision)
        watch(f"{slot.title}: judging, {case}")
        _judge(call, slot, trials, Truth(case, x))
        watch(f"{slot.title}: timing, {case}")
        _race(call, slot, case, trials, device, rounds)


def _compile(slot: Slot, trials: Sequence[Trial], device: torch.device) -> None:
    """Run every row once for each kind of case, many at a time; lengths are in no kernel's key.

    Triton's C++ passes and ptxas release Python's lock.
    """
    kinds = {(case.causal, case.dropout, case.head_size, case.variant): case for case in slot.cases}.values()
    calls = [Call(slot.backend, case, Inputs.random(case, device), slot.precision) for case in kinds]

    def once(job: tuple[Call, Trial]) -> None:
        call, (row, candidate) = job
        with _excused(candidate), torch.cuda.device(device):
            call.timed(call.plan(slot.table, row), slot.pass_)()

    with redirect_stdout(io.StringIO()), ThreadPoolExecutor(WORKERS) as pool:  # where Triton prints whole programs
        list(pool.map(once, product(calls, trials)))
    synchronize(device)


def _judge(call: Call, slot: Slot, trials: Sequence[Trial], truth: Truth) -> None:
    """Mark the rows that do not run, or whose o, dq, dk or dv is wrong."""
    for row, candidate in _alive(trials):
        with _excused(candidate), _poisoned():
            plan = call.plan(slot.table, row)
            saved = call.forward(plan)
            grads = call.backward(plan, saved)[:3] if call.differentiable else ()
            verdict = truth.judge(dict(zip(NAMES, (saved.o, *grads), strict=False)))
            if verdict.wrong:
                why = f"{', '.join(verdict.wrong)} more than twice as wrong as plain torch"
                candidate.status, candidate.why = WRONG, why


def _race(call: Call, slot: Slot, case: Case, trials: Sequence[Trial], device: torch.device, rounds: int) -> None:
    """Time every row once a round, each time starting with another."""
    calls: dict[int, tuple[Callable[[], Any], Pace]] = {}
    samples: dict[int, list[float]] = {}
    for turn in range(rounds):
        for index in ((turn + k) % len(trials) for k in range(len(trials))):
            row, candidate = trials[index]
            if candidate.status != OK:
                continue
            with _excused(candidate):
                if index not in calls:
                    timed = call.timed(call.plan(slot.table, row), slot.pass_)
                    calls[index] = timed, pace(timed, device)
                samples.setdefault(index, []).append(sample(*calls[index], device))
    for index, (_, candidate) in enumerate(trials):
        if candidate.status == OK:
            low, median, high = spread(samples[index])
            candidate.milliseconds[str(case)] = 1e3 * median
            candidate.spread[str(case)] = (high - low) / median


def _alive(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial[1].status == OK]


@contextmanager
def _excused(candidate: Candidate) -> Iterator[None]:
    """Record an exception as the candidate's reason."""
    try:
        yield
    except Exception as error:
        candidate.status, candidate.why = FAILED, f"{type(error).__name__}: {_told(error)}"


def _told(error: Exception) -> str:
    """Return the line of a message that says why. Compilers put it at the end, or after the word fatal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    fatal = [line for line in lines if "fatal" in line]
    last = type(error).__name__ == "CompilationError"
    return (fatal or lines)[-1 if last and not fatal else 0][:200]


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill new memory with NaN, so that no row passes with values that another left."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    setting: Any = torch.utils.deterministic
    filled = setting.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        setting.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            setting.fill_uninitialized_memory = filled


def _module(backend: str, name: str) -> Any:
    return importlib.import_module(f"tilewise.{backend}.{name}")


def _recipe(backend: str, case: Case, precision: str | None) -> Recipe:
    mask = (("Causal",),) if case.causal else ()
    return Recipe(mask=mask, dropout=case.dropout, products=products_of(precision).plain, backend=backend)


def _problem(backend: str, case: Case, device: torch.device, precision: str | None = None) -> Problem:
    """Return a case's problem on a device, without memory for it."""
    shapes = case.shape, case.key_shape, case.value_shape
    q, k, v = (torch.empty(shape, dtype=case.type, device="meta") for shape in shapes)
    p = describe_fake(Operands(q, k, v, ()), _recipe(backend, case, precision), (0, 0), target_of(device))
    specs = [spec._replace(device=device) for spec in (p.q, p.k, p.v)]
    matmul = matmul_setting() if case.dtype == "fp32" else None
    return p._replace(q=specs[0], k=specs[1], v=specs[2], matmul=matmul)
