"""How accurate is fp32 attention? Errors against fp64 of every precision and of PyTorch's kernels, by one parameter.

A sweep changes one field of a `Point`. Both heads of a point are compared whole: the truth is computed some hundred
queries at a time (see `accuracy`), so nothing has to be sampled, not even at 64K tokens.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..bench.accuracy import NAMES, Inputs, Truth, run_once
from ..bench.engine import excuse
from ..bench.peers import PEERS, Peer
from ..bench.results import OK, REFUSED
from ..bench.suites import PRECISE, Case
from ..bench.tables import STANDARD

PART = "accuracy"
"""Of a results file."""
CONTENDERS = (*PRECISE, "tilewise tiled", "sdpa efficient", "sdpa math", "standard tf32")
OUTLIERS = 1e-3
"""The share of entries that are outliers."""


@dataclass(frozen=True)
class Point:
    """Causal self-attention of standard normal q, k, v and do: fp32, one batch entry, two heads."""

    length: int = 4096
    head_size: int = 64
    scale: float = 1.0
    """q is multiplied by it, so it is the standard deviation of the logits."""
    outliers: float = 1.0
    """One in a thousand entries of q, k and v is multiplied by it."""
    mean: float = 0.0
    """Added to every entry of k and v."""

    @property
    def case(self) -> Case:
        """Return its shape, for peers."""
        return Case(1, 2, self.length, self.head_size, "fp32", causal=True)

    def inputs(self, device: torch.device) -> Inputs:
        """Draw the same numbers for the same point on the same kind of device."""
        x = Inputs.random(self.case, device)
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            for t in x[:3]:
                chosen = torch.rand(t.shape, generator=generator, device=device) < OUTLIERS
                t.mul_(torch.where(chosen, self.outliers, 1.0))
            x.q.mul_(self.scale)
            x.k.add_(self.mean)
            x.v.add_(self.mean)
        return x


@dataclass(eq=False)
class Finding:
    """The errors of one implementation at one point, by tensor. Without them, `why` says what was in the way."""

    point: dict[str, Any]
    implementation: str
    status: str = OK
    why: str | None = None
    relative: dict[str, float] | None = None
    """Of o, dq, dk, dv: the norm of the error over the norm of the truth."""
    largest: dict[str, float] | None = None
    """The largest error over the largest entry of the truth."""

    @property
    def at(self) -> Point:
        """Return the point as a value."""
        return Point(**self.point)


SWEEPS: dict[str, tuple[Point, ...]] = {
    "length": tuple(Point(length=1024 << doublings) for doublings in range(7)),
    "head_size": tuple(Point(head_size=size) for size in (16, 32, 64, 128, 256)),
    "scale": tuple(Point(scale=scale) for scale in (0.25, 1.0, 4.0, 16.0)),
    "outliers": tuple(Point(outliers=factor) for factor in (1.0, 10.0, 30.0, 100.0)),
    "mean": tuple(Point(mean=mean) for mean in (0.0, 1.0, 10.0)),
}
"""By the field that changes."""


def quick(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return two short points."""
    return tuple(replace(point, length=min(point.length, 512 << index)) for index, point in enumerate(points[:2]))


def run(
    points: Sequence[Point],
    device: torch.device,
    watch: Callable[[str], None] = lambda text: None,
    peers: Sequence[Peer] = tuple(PEERS[name] for name in CONTENDERS),
) -> Iterator[list[Finding]]:
    """Yield the findings of one point after another, plain torch first."""
    for point in points:
        watch(f"{point}: the truth")
        x = point.inputs(device)
        truth = Truth(point.case, x)
        found = [_finding(point, STANDARD, truth.by_torch, truth.exact)]
        for peer in peers:
            watch(f"{point}: {peer.name}")
            found.append(_examine(point, peer, x, truth, device))
        yield found
        del x, truth
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _examine(point: Point, peer: Peer, x: Inputs, truth: Truth, device: torch.device) -> Finding:
    if reason := peer.why_not(point.case, device):
        return Finding(asdict(point), peer.name, REFUSED, reason)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            results = run_once(peer, peer.prepare(point.case, device), x)
        except Exception as error:
            return Finding(asdict(point), peer.name, *excuse(error, heard))
    return _finding(point, peer.name, truth.of_heads(results), truth.exact)


def _finding(point: Point, name: str, mine: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> Finding:
    relative, largest = {}, {}
    for tensor in NAMES:
        true = torch.stack([head[tensor] for head in exact])
        error = torch.stack([head[tensor].double() for head in mine]) - true
        relative[tensor] = float(error.norm() / true.norm())
        largest[tensor] = float(error.abs().max() / true.abs().max())
    return Finding(asdict(point), name, relative=relative, largest=largest)
