"""Does accumulating in fp16 pay? Registers and spills of every kernel for any chip, and on a GPU their times."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.call.recipe import Recipe

from .. import environment
from ..bench.engine import excuse
from ..bench.measure import Pace, pace, sample, spread
from ..bench.peers import PEERS
from ..bench.suites import FORWARD, Case
from .measure import KERNELS, TILES, Combination, tiles_for

# Registers and spills


@dataclass(eq=False)
class Kernel:
    """What one combination compiled to for a chip."""

    target: str
    head_size: int
    tiles: list[int]
    """Rows of queries, columns of keys, warps, stages."""
    combination: dict[str, str]
    registers: int | None = None
    spills: int | None = None
    """Bytes of local memory a thread."""
    shared: int | None = None
    why: str | None = None

    @property
    def of(self) -> Combination:
        """Return the combination as a value."""
        return Combination(**self.combination)


def kernels(
    target: str, watch: Callable[[str], None] = lambda text: None, processes: int | None = None
) -> list[Kernel]:
    """Compile every kernel for a chip, in separate processes, which leave them in Triton's cache."""
    count = processes or max(1, min(8, (os.cpu_count() or 2) // 2))
    command = [sys.executable, "-m", f"{__package__}.compiled", target, str(count)]
    running = [
        subprocess.Popen(
            [*command, str(share)],
            env=environment(TRITON_INTERPRET="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(count)
    ]
    found = []
    for process in running:
        assert process.stdout
        for line in process.stdout:
            found.append(Kernel(**json.loads(line)))
            watch(f"{target}: {found[-1].of}")
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(said.strip().splitlines()[-1] if said.strip() else "the compiling process died")
    order = [asdict(c) for c in KERNELS]
    return sorted(
        found, key=lambda k: (k.head_size, TILES[k.head_size].index(tuple(k.tiles)), order.index(k.combination))
    )


# Speed


@dataclass(eq=False)
class Time:
    """How long one kernel, or a peer, takes for one case. Without a time, `why` says what was in the way."""

    case: dict[str, Any]
    implementation: str
    combination: dict[str, str] | None = None
    tiles: list[int] | None = None
    """The fastest of TILES."""
    milliseconds: float | None = None
    milliseconds_p20: float | None = None
    milliseconds_p80: float | None = None
    tflops: float | None = None
    why: str | None = None

    @property
    def on(self) -> Case:
        """Return the case as a value."""
        return Case(**self.case)


TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
CHOOSING = 4096
"""The length at which the fastest tiles are chosen."""
ROUNDS = 6
COMPARED = ("tilewise", "tilewise triton")


def cases(head_size: int, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Return cases of 16K tokens of 2048 entries, without a mask."""
    return [Case(TOKENS // n, WIDTH // head_size, n, head_size, "fp16") for n in lengths]


def times(
    device: torch.device, watch: Callable[[str], None] = lambda text: None, lengths: Sequence[int] = LENGTHS
) -> Iterator[list[Time]]:
    """Yield the times of one case after another: every kernel with its best tiles, and tilewise's, in turns."""
    for head_size in TILES:
        watch(f"head size {head_size}: choosing tiles")
        best = {c: _best_tiles(cases(head_size, (CHOOSING,))[0], c, device) for c in KERNELS}
        for case in cases(head_size, lengths):
            watch(str(case))
            yield _race(case, best, device)


def _operands(case: Case, device: torch.device) -> tuple[Problem, Operands]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(case.shape, generator=generator, device=device, dtype=case.type) for _ in range(3))
    x = Operands(q, k, v, ())
    return describe(x, Recipe(), (0, 0)), x


def _call(case: Case, combination: Combination, tiles: Any, device: torch.device) -> Callable[[], Tensor]:
    from . import launch

    (problem, x), accumulate = _operands(case, device), combination.accumulate(torch.zeros(1))
    return lambda: launch.forward(problem, x, accumulate, tiles)


def _best_tiles(case: Case, combination: Combination, device: torch.device) -> tuple[Any, str | None]:
    """Return the fastest tiles, or None and the reason."""
    said: str | None = None
    found: dict[Any, float] = {}
    for tiles in tiles_for(case.head_size):
        call = _call(case, combination, tiles, device)
        try:
            steps = pace(call, device)
        except Exception as error:  # a tile that does not fit the chip
            said = excuse(error, ())[1]
        else:
            found[tiles] = statistics.median(sample(call, steps, device) for _ in range(3))
    return (min(found, key=lambda t: found[t]), None) if found else (None, said)


def _race(case: Case, best: dict[Combination, tuple[Any, str | None]], device: torch.device) -> list[Time]:
    rows: list[Time] = []
    calls: list[Callable[[], Any]] = []
    for combination, (tiles, why) in best.items():
        row = Time(asdict(case), str(combination), asdict(combination), list(tiles[:4]) if tiles else None, why=why)
        rows.append(row)
        calls.append(_call(case, combination, tiles, device) if tiles else lambda: None)
    _, x = _operands(case, device)
    for name in COMPARED:
        peer = PEERS[name]
        row = Time(asdict(case), name, why=peer.why_not(case, device))
        rows.append(row)
        attend = None if row.why else peer.prepare(case, device)
        calls.append((lambda attend=attend: attend(*x[:3])) if attend else lambda: None)
    paces: dict[int, Pace] = {i: pace(call, device) for i, call in enumerate(calls) if not rows[i].why}
    samples: dict[int, list[float]] = {i: [] for i in paces}
    order = list(paces)
    for turn in range(ROUNDS):
        for i in (*order[turn % len(order) :], *order[: turn % len(order)]):
            samples[i].append(sample(calls[i], paces[i], device))
    for i, seconds in samples.items():
        low, median, high = spread(seconds)
        rows[i].milliseconds, rows[i].milliseconds_p20, rows[i].milliseconds_p80 = median * 1e3, low * 1e3, high * 1e3
        rows[i].tflops = case.flops(FORWARD) / median / 1e12
    return rows
