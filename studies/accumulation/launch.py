"""Launches of the experiment: turn a problem into the arguments of its kernel."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.call.backend import FORWARD
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.host.arguments import cdiv, rows, with_adjacent_rows
from tilewise.host.launch import Launch, current_stream, on_device
from tilewise.host.lists import tile_lists
from tilewise.host.values import device_values
from tilewise.tile.ranges import Variant
from tilewise.triton.backend import backend as portable
from tilewise.triton.plan import constants, plan
from tilewise.triton.tiles import AMPERE, Tiles, current

from .accumulate import Accumulate
from .forward import Sums
from .forward import forward as kernel

TARGETS = ("sm_90", *AMPERE)
"""Chips whose matrix instructions sum in fp16, and for which Triton writes them; tests read that in its code."""


class Plan(NamedTuple):
    """What follows from a problem, the sums and the tiles."""

    c: float
    section: int
    listed: bool
    constants: dict[str, Any]
    compiled: dict[Any, Any]


def why_not(p: Problem, accumulate: "Accumulate") -> list[str]:
    """Return the portable back end's reasons, and the lack of fp16 accumulators."""
    against = portable.why_not(p._replace(recipe=p.recipe._replace(backend="triton")), FORWARD)
    if not against and p.target not in ("cpu", *TARGETS):
        against.append(
            f"{p.target} has no matrix instructions that sum in fp16, or Triton does not use them; it takes "
            + ", ".join(TARGETS)
        )
    return against


@lru_cache(4096)
def planned(p: Problem, accumulate: "Accumulate", tiles: Tiles) -> Plan:
    """Return the portable forward's plan, with other sums."""
    portable_plan = plan(p)
    halves = "rounded" if p.target == "cpu" else "halves"  # the interpreter has no packed instruction
    sums = Sums(
        accumulate.scores, accumulate.values, accumulate.division == "in-loop",
        halves if accumulate.exp2 == "halves" else "fp32",
    )  # fmt: skip
    assert portable_plan.c is not None  # None only with a bias, and there are no scores here
    fixed = {"sums": sums, **constants(p, portable_plan, tiles)}
    return Plan(portable_plan.c, portable_plan.section, p.listed, fixed, {})


def launches(p: Problem, x: Operands, o: Tensor, accumulate: "Accumulate", tiles: Tiles) -> list[Launch]:
    """Return one launch, and one before it if tiles are listed."""
    pl = planned(p, accumulate, tiles)
    parts, _, _ = device_values(p, x.extra)
    lists, listing = tile_lists(p, pl, tiles, parts, x, by_key=False)
    across, heads = cdiv(p.M, tiles.B_r), p.B * p.H
    arguments = (
        *(rows(t) for t in (*x[:3], o)), Variant(parts, (), None, lists), pl.c, float(accumulate.lower(p.N)),
        p.M, p.N, p.H, heads, pl.section, across,
    )  # fmt: skip
    return [*listing, Launch(kernel, heads * across, arguments, pl.constants, pl.compiled)]


def forward(p: Problem, x: Operands, accumulate: "Accumulate", tiles: Tiles | None = None) -> Tensor:
    """Compute o, by the portable forward's tiles unless others are given."""
    o = torch.empty((*p.q.shape[:-1], p.D_v), dtype=p.dtype, device=x.q.device)
    x = with_adjacent_rows(x)
    if p.target == "cpu":
        _run(p, x, o, accumulate, tiles)
    else:
        with on_device(x.q):
            _run(p, x, o, accumulate, tiles)
    return o


def _run(p: Problem, x: Operands, o: Tensor, accumulate: "Accumulate", tiles: Tiles | None) -> None:
    stream = current_stream(x.q.device)
    for launch in launches(p, x, o, accumulate, tiles or current(p).forward):
        launch.run(stream)
