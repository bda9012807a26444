"""Launch the kernels that split keys on Hopper, for few rows of queries."""

from dataclasses import dataclass
from math import gcd

from torch import Tensor

from ...call.backend import Plan as PassPlan
from ...call.operands import Operands, Saved
from ...call.problem import Problem, once
from ...host import split as host_split
from ...host.arguments import adjacent, rows
from ...host.launch import Launch
from ...host.tables import source_of_rows
from ..descriptors import Box, Descriptor, box
from ..tiles import padded
from .choice import ROWS, programs_of
from .kernel import attention_decode

STAGES = 12
"""Tiles in shared memory, 16 kB each."""
REGISTERS = 112
"""Of a thread, before the roles divide them: programs of `attention_combine` fit beside."""


@dataclass(frozen=True, eq=False)
class Plan(host_split.SplitPlan):
    """What follows from the problem alone."""

    boxes: tuple[Box, Box]
    """Describe k and v to TMA, in boxes of 64 columns."""


@once
def plan(p: Problem) -> Plan:
    """Plan a problem: one program a multiprocessor."""
    W, B_C, page = host_split.dividing(p, ROWS, programs_of(p)), 8192 // padded(p), p.layout.page(p) or 0
    fields = host_split.planned(p, W, ROWS, B_C, 0, B_C, STAGES, "ieee", HOPPER=True, EARLY=True)
    k, v = (box(t.shape, t.stride, gcd(page, B_C), 64, p) for t in (p.k, p.v))
    return Plan(*fields, (k, v))


def plan_of(p: Problem) -> PassPlan:
    """Return how a forward runs."""
    return host_split.plan_split(p, plan(p), launches, describe)


def launches(p: Problem, pl: Plan, x: Operands, saved: Saved, partial: Tensor) -> list[Launch]:
    """Return the kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does."""
    inputs = rows(adjacent(x.q)), *map(Descriptor, x[1:3], pl.boxes)
    constants = {"D": padded(p), "num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    return host_split.launches_of(p, pl, x, saved, partial, attention_decode, inputs, (), constants)


def describe(p: Problem, pl: Plan) -> tuple[str, ...]:
    """Describe what runs a problem."""
    looked = pl.split.B_C // pl.boxes[0].block_shape[2]
    return (*host_split.describe(p, pl, "4 warps and one that loads", looked), source_of_rows(p.q.device))
