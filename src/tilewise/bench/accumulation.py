"""Does accumulating in fp16 pay, and when does it break? Errors and overflow by what changes, kernels, times.

Every combination of what Q K^T and P V are summed in, of four ways to divide, and of exp2 in fp32 or packed halves. On
a GPU the kernel itself is examined and timed; on a CPU its emulation (experimental/rounded.py) is examined, which
rounds where the kernel's matrix unit would, and nothing is timed.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..experimental import LARGEST, Accumulate, rounded
from ..problem import Operands, Problem, Recipe, describe
from .engine import excuse
from .measure import Pace, pace, sample, spread
from .peers import PEERS
from .results import OK
from .suites import FORWARD, Case

PART = "accumulation"
"""Of a results file."""
SOURCES = ("tile/**/*.py", "experimental/**/*.py")
"""Of which numbers here depend."""
HEAD_SIZE, HEADS, QUERIES = 64, 2, 256
DELAYED, FACTOR, FITTED, IN_LOOP = "delayed", "log factor", "log factor, this V", "in-loop"
WAYS = (DELAYED, FACTOR, FITTED, IN_LOOP)


@dataclass(frozen=True)
class Combination:
    """What is summed in what, how it is divided, and how exponentials are taken."""

    scores: str = "fp32"
    values: str = "fp32"
    way: str = DELAYED
    exp2: str = "fp32"

    def accumulate(self, v: Tensor) -> Accumulate:
        """The same for certain values: one way looks at the largest of them."""
        stability = {FACTOR: True, FITTED: float(v.abs().max()) if self.way == FITTED else 0.0}.get(self.way, False)
        return Accumulate(self.scores, self.values, IN_LOOP if self.way == IN_LOOP else DELAYED, stability, self.exp2)

    @property
    def words(self) -> list[str]:
        """For the first columns of a table."""
        return [self.scores, self.values, self.way, self.exp2]

    def __str__(self) -> str:
        words = [f"QK {self.scores}", f"PV {self.values}", self.way]
        return ", ".join([*words, *(["exp2 in halves"] if self.exp2 == "halves" else [])])


COMBINATIONS = tuple(
    Combination(*choice) for choice in product(("fp32", "fp16"), ("fp32", "fp16"), WAYS, ("fp32", "halves"))
)
KERNELS = tuple(c for c in COMBINATIONS if c.way in (DELAYED, IN_LOOP))
"""Those that are different kernels: the factor is a number that every kernel takes, so it changes no time."""
PLAIN = Combination()


# Errors and overflow


@dataclass(frozen=True)
class Point:
    """256 queries of two heads of size 64, against `length` keys; standard normal entries but for what is said here."""

    length: int = 4096
    scale: float = 1.0
    """q is multiplied by it, so it is the standard deviation of the logits."""
    channel: float = 1.0
    """One entry of every row of q and k is multiplied by it, as some models' are."""
    normalised: bool = False
    """Whether every row of q and k is divided by its root mean square (after the channel, before the scale)."""
    mean: float = 0.0
    """Of v, whose standard deviation is a tenth of it, but at least 1."""

    def operands(self, device: torch.device) -> Operands:
        """The same numbers for the same point on the same kind of device; fp16, clamped to what fp16 holds."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(length: int) -> Tensor:
            return torch.randn((1, length, HEADS, HEAD_SIZE), generator=generator, device=device)

        q, k = normal(QUERIES), normal(self.length)
        v = self.mean + max(1.0, self.mean / 10.0) * normal(self.length)
        for t in (q, k):
            t[..., 0] *= self.channel
            if self.normalised:
                t.div_(t.square().mean(-1, keepdim=True).sqrt())
        q, k, v = (t.clamp(-LARGEST, LARGEST).half() for t in (q * self.scale, k, v))
        return Operands(q, k, v, ())


SWEEPS: dict[str, tuple[Point, ...]] = {
    "length": tuple(Point(length=1024 << doublings) for doublings in range(7)),
    "scale": tuple(Point(scale=scale) for scale in (0.25, 1.0, 4.0, 16.0, 64.0)),
    "channel": tuple(Point(channel=factor) for factor in (1.0, 10.0, 30.0, 100.0, 300.0)),
    "normalised": tuple(Point(channel=factor, normalised=True) for factor in (1.0, 10.0, 30.0, 100.0, 300.0)),
    "mean": tuple(Point(mean=mean) for mean in (0.0, 1.0, 10.0, 100.0, 1000.0, 60000.0)),
}


def quick(points: Sequence[Point]) -> tuple[Point, ...]:
    """The first and the last, short."""
    return tuple(replace(point, length=min(point.length, 256 << index)) for index, point in enumerate(points[::4][:2]))


@dataclass(eq=False)
class Finding:
    """What one combination gives at one point. Without numbers, `why` says what was in the way."""

    point: dict[str, Any]
    combination: dict[str, str]
    status: str = OK
    why: str | None = None
    relative: float | None = None
    """The norm of o's error over the norm of the truth; None if any entry is not finite."""
    largest: float | None = None
    """The largest error over the largest entry of the truth."""
    overflow: float | None = None
    """The share of o's entries that are not finite."""

    @property
    def at(self) -> Point:
        """The point as a value."""
        return Point(**self.point)

    @property
    def of(self) -> Combination:
        """The combination as a value."""
        return Combination(**self.combination)


def run(
    points: Sequence[Point], device: torch.device, watch: Callable[[str], None] = lambda text: None,
    combinations: Sequence[Combination] = COMBINATIONS,
) -> Iterator[list[Finding]]:  # fmt: skip
    """The findings of one point after another."""
    for point in points:
        x = point.operands(device)
        problem = describe(x, Recipe(), (0, 0))
        exact = truth(x)
        found = []
        for combination in combinations:
            watch(f"{point}: {combination}")
            found.append(_examine(point, combination, problem, x, exact))
        yield found


def truth(x: Operands) -> Tensor:
    """o in fp64."""
    q, k, v = (t.double().transpose(1, 2) for t in x[:3])
    return (torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v).transpose(1, 2)


def _examine(point: Point, combination: Combination, problem: Problem, x: Operands, exact: Tensor) -> Finding:
    accumulate = combination.accumulate(x.v)
    try:
        o = _attend(problem, x, accumulate).double()
    except Exception as error:
        return Finding(asdict(point), asdict(combination), *excuse(error, ()))
    overflow = 1.0 - float(o.isfinite().double().mean())
    found = Finding(asdict(point), asdict(combination), overflow=overflow)
    if not overflow:
        error = o - exact
        found.relative = float(error.norm() / exact.norm())
        found.largest = float(error.abs().max() / exact.abs().max())
    return found


def _attend(problem: Problem, x: Operands, accumulate: Accumulate) -> Tensor:
    if problem.target == "cpu":
        return rounded.forward(problem, x, accumulate)
    from ..experimental import launch

    if reasons := launch.why_not(problem, accumulate):
        raise ValueError("; ".join(reasons))
    return launch.forward(problem, x, accumulate, tiles_for(problem.D)[0])


# Kernels: registers and spills


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
        """The combination as a value."""
        return Combination(**self.combination)


TILES = {
    64: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
    128: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
}
"""By head size. fp16 sums take half the registers, so a larger tile may fit them that does not fit fp32."""


def tiles_for(head_size: int) -> Any:
    """TILES as the launcher takes them."""
    from ..triton.tiles import Tiles

    return [Tiles(*sizes) for sizes in TILES[head_size]]


def kernels(
    target: str, watch: Callable[[str], None] = lambda text: None, processes: int | None = None
) -> list[Kernel]:
    """Every kernel compiled for a chip, in processes of their own, which leave them in Triton's cache."""
    count = processes or max(1, min(8, (os.cpu_count() or 2) // 2))
    command = [sys.executable, "-m", f"{__package__}.compiled", target, str(count)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    running = [
        subprocess.Popen(
            [*command, str(share)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
        """The case as a value."""
        return Case(**self.case)


TOKENS, WIDTH = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
CHOOSING = 4096
"""The length at which the fastest tiles are chosen."""
ROUNDS = 6
BESIDE = ("tilewise", "tilewise triton")


def cases(head_size: int, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """16K tokens of 2048 entries, without a mask."""
    return [Case(TOKENS // n, WIDTH // head_size, n, head_size, "fp16") for n in lengths]


def times(
    device: torch.device, watch: Callable[[str], None] = lambda text: None, lengths: Sequence[int] = LENGTHS
) -> Iterator[list[Time]]:
    """The times of one case after another: every kernel with its best tiles, and tilewise's own, in turns."""
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
    from ..experimental import launch

    (problem, x), accumulate = _operands(case, device), combination.accumulate(torch.zeros(1))
    return lambda: launch.forward(problem, x, accumulate, tiles)


def _best_tiles(case: Case, combination: Combination, device: torch.device) -> tuple[Any, str | None]:
    """The fastest tiles, or None and what was in the way."""
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
    for name in BESIDE:
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
