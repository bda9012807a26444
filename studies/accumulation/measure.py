"""When does accumulating in fp16 break? Errors and overflow of every combination, by what changes.

A combination is the types of the sums Q K^T and P V, one of four ways to divide, and exp2 in fp32 or packed halves. On
a GPU the kernel itself is examined; on a CPU its emulation (rounded.py), which rounds where its matrix unit would.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilewise.call.check import describe
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.call.recipe import Recipe

from ..bench.engine import excuse
from ..bench.results import OK
from . import LARGEST, Accumulate, rounded

PART = "accumulation"
"""Of a results file."""
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
        """Return the option for certain values, because one way depends on the largest of them."""
        stability = {FACTOR: True, FITTED: float(v.abs().max()) if self.way == FITTED else 0.0}.get(self.way, False)
        return Accumulate(self.scores, self.values, IN_LOOP if self.way == IN_LOOP else DELAYED, stability, self.exp2)

    @property
    def words(self) -> list[str]:
        """Return the first columns of a table."""
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
TILES = {
    64: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)),
    128: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)),
}
"""By head size. fp16 sums take half the registers, so a larger tile may fit them that does not fit fp32."""


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
        """Draw the same numbers for the same point on the same kind of device: fp16, clamped to its range."""
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
    """Return the first and the last point, shortened."""
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
        """Return the point as a value."""
        return Point(**self.point)

    @property
    def of(self) -> Combination:
        """Return the combination as a value."""
        return Combination(**self.combination)


def run(
    points: Sequence[Point], device: torch.device, watch: Callable[[str], None] = lambda text: None,
    combinations: Sequence[Combination] = COMBINATIONS,
) -> Iterator[list[Finding]]:  # fmt: skip
    """Yield the findings of one point after another."""
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
    """Compute o in fp64."""
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


def tiles_for(head_size: int) -> Any:
    """Return TILES as the launcher takes them."""
    from tilewise.triton.tiles import Tiles

    return [Tiles(*sizes) for sizes in TILES[head_size]]


def _attend(problem: Problem, x: Operands, accumulate: Accumulate) -> Tensor:
    if problem.target == "cpu":
        return rounded.forward(problem, x, accumulate)
    from . import launch

    if reasons := launch.why_not(problem, accumulate):
        raise ValueError("; ".join(reasons))
    return launch.forward(problem, x, accumulate, tiles_for(problem.D)[0])
