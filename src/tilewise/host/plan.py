"""Plans of the GPU back ends: a launch module's functions for a problem and what follows from it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..call.backend import Plan, never
from ..call.operands import Operands
from ..call.problem import Problem
from ..values.listed import TileList
from .ahead import compile_gradient
from .launch import on_device
from .lists import make_lists
from .replay import Replay


@dataclass(frozen=True, eq=False, kw_only=True)
class Launched:
    """What calls of a problem have launched. The plans of launch modules derive from it, and add what follows from the
    problem alone."""

    compiled: dict[Any, Any] = field(default_factory=dict)
    """The compiled kernels."""
    replays: defaultdict[Any, Replay] = field(default_factory=lambda: defaultdict(Replay))
    """The launches of forwards, by how many tensors they save, and those of backwards, by `unplanned`."""


def plan_of(
    p: Problem, pl: Any, run: Callable[..., Any], describe: Callable[..., Sequence[str]],
    tiles: Sequence[tuple[Any, bool]] = (), repeat: Callable[..., Any] = never, rest: Problem | None = None,
) -> Plan:  # fmt: skip
    """Return how a pass runs on x's device. All functions get the problem and `pl` first. `tiles`: those of kernels
    that read lists of a mask's tiles, and whether by key."""

    def run_on_device(x: Operands, *given: Any) -> Any:
        with on_device(x.q):
            return run(p, pl, x, *given)

    def lists(x: Operands) -> tuple[TileList, ...]:
        with on_device(x.q):
            return make_lists(p, pl, x, tiles)

    return Plan(
        run_on_device, lambda: tuple(describe(p, pl)), lists, partial(repeat, p, pl), rest, partial(compile_gradient, p)
    )  # fmt: skip
