"""Launch the kernels that split keys on Hopper, for few rows of queries."""

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from ...call.backend import Plan as PassPlan
from ...call.operands import Operands, Saved
from ...call.problem import Problem, once
from ...host import split as host_split
from ...host.arguments import adjacent, cdiv, rows
from ...host.launch import Launch
from ...host.tables import source_of_rows
from ..descriptors import Box, Descriptor, box
from ..tiles import padded
from .choice import latents, programs_of, tile_of
from .kernel import Panels, attention_decode

PANEL = 192
"""Columns of latents in a stage."""


@dataclass(frozen=True, eq=False)
class Plan(host_split.SplitPlan):
    """What follows from the problem alone."""

    boxes: tuple[Box, Box]
    """Describe k and v to TMA, in boxes of 64 columns."""
    panels: Panels
    registers: int


@once
def plan(p: Problem) -> Plan:
    """Plan a problem: as many programs as multiprocessors hold."""
    panels, tile, page = panels_of(p), tile_of(p), p.layout.page(p) or 0
    W, B_C = host_split.dividing(p, tile.rows, programs_of(p)), 64 if panels.shared else 8192 // padded(p)
    fields = host_split.planned(p, W, tile.rows, B_C, 0, B_C, tile.stages, "ieee", HOPPER=True, EARLY=True)
    k, v = (box(t.shape, t.stride, gcd(page, B_C), 64, p) for t in (p.k, p.v))
    return Plan(*fields, (k, v), panels, tile.registers)


def panels_of(p: Problem) -> Panels:
    """Return how a tile of keys lies in stages."""
    if latents(p):
        return Panels(PANEL, cdiv(p.D, PANEL), cdiv(p.D_v, PANEL), shared=True)
    return Panels(padded(p), 1, 1, shared=False)


def plan_of(p: Problem) -> PassPlan:
    """Return how a forward runs."""
    return host_split.plan_split(p, plan(p), launches, describe)


def launches(p: Problem, pl: Plan, x: Operands, saved: Saved, partial: Tensor) -> list[Launch]:
    """Return the kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does."""
    k, v = map(Descriptor, x[1:3], pl.boxes)
    inputs = rows(adjacent(x.q)), k, None if pl.panels.shared else v
    constants = {"panels": pl.panels, "num_warps": 4, "maxnreg": pl.registers, "launch_pdl": True}
    return host_split.launches_of(p, pl, x, saved, partial, attention_decode, inputs, (), constants)


def describe(p: Problem, pl: Plan) -> tuple[str, ...]:
    """Describe what runs a problem."""
    looked = pl.split.B_C // pl.boxes[0].block_shape[2]
    of_v = ["V is read from K's tiles"] * pl.panels.shared
    return (*host_split.describe(p, pl, "4 warps and one that loads", looked), *of_v, source_of_rows(p.q.device))
