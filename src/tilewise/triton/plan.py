"""Compute what follows from a problem alone: tiles, grid sizes, and constants of kernels."""

from dataclasses import dataclass
from typing import Any

import torch

from ..call.problem import Problem, once
from ..host.arguments import odd, scale_of
from ..host.plan import Launched
from ..quantize.codes import columns
from ..tile.blocks import Tile
from ..tile.schedule import Schedule
from ..tile.softmax import LOG2E
from .tiles import Rows, Tiles, bias_tiles, current, precision

CACHED_KEYS = 32 << 20
"""Bytes of K and V that concurrent programs may share, so that these stay in a data-centre GPU's L2 cache."""


@dataclass(frozen=True, eq=False)
class Plan(Launched):
    """The parts of a launch that follow from the problem alone."""

    forward: Tiles
    dq: Tiles
    dkdv: Tiles | None
    bias: Tiles
    c: float | None
    """Logits times c are in base 2, the forward's unit. With a bias it is None, and logits are in natural log."""
    unit: float
    """Logits times this are in the backward's unit: base 2, or for fp32 natural log."""
    section: int
    precision: str
    """How products of the precision asked for are computed."""


@once
def plan(p: Problem) -> Plan:
    """Plan a problem with the rows of tile sizes in use."""
    return planned(p, current(p))


def planned(p: Problem, chosen: Rows) -> Plan:
    """Plan a problem with the given rows."""
    per_head = p.N * (p.D + p.D_v) * p.q.dtype.itemsize
    group = p.H // p.H_k
    section = max(1, CACHED_KEYS // max(1, per_head)) * group
    natural = scale_of(p)
    c = natural * LOG2E.value
    unit = natural if p.dtype == torch.float32 else c
    bias, products = bias_tiles(p, chosen.dq), precision(p) or "ieee"
    return Plan(*chosen, bias, None if p.biased else c, unit, section, products)


def schedule(*counts: int) -> Schedule:
    """Return a schedule as a kernel argument."""
    return Schedule(*map(odd, counts))


def constants(p: Problem, pl: Plan, tiles: Tiles) -> dict[str, Any]:
    """Return a kernel's constants and compiler options."""
    tile = Tile(p.H // p.H_k, columns(p), p.D_v, tiles.B_r, tiles.B_c, pl.precision)
    return {"tile": tile, **tiles.options(num_stages=tiles.stages)}
