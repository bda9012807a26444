"""Launches of the kernels that split keys: arguments follow from shapes, not from what lengths hold."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.backend import Plan as PassPlan
from ...call.operands import Operands, Saved
from ...call.problem import Problem, once
from ...host import split as host_split
from ...host.arguments import adjacent, rows, scales_of
from ...host.launch import Launch, multiprocessors
from ..tiles import HOPPER, Tiles, decode_tiles, precision
from .kernel import WIDE, attention_decode

LEAST = 64
"""The fewest keys that a program takes."""
FAST_MEMORY = 4e12
"""Below these bytes a second (H100: 3.4e12), keys are read faster with fewer loads in flight, as they are where two
programs share a multiprocessor."""
SHARING = "sm_90", "cpu"
"""Chips on which tiles of K serve as V, too: elsewhere, what two products read in two ways is not copied ahead."""


@dataclass(frozen=True, eq=False)
class Plan(host_split.SplitPlan):
    """What follows from the problem alone."""

    tiles: Tiles


@once
def plan(p: Problem) -> Plan:
    """Plan a problem with its row of tile sizes."""
    tiles = decode_tiles(p, v_in_k(p))
    return planned(p, tiles, programs(p, tiles))


def planned(p: Problem, tiles: Tiles, W: int, least: int = LEAST) -> Plan:
    """Plan a problem with the given row, and W programs for each key head."""
    page = p.layout.page(p)
    stages = tiles.stages if page else (tiles.stages + 1) // 2
    decodes = p.target in HOPPER and tiles.B_r == 16 and p.k.dtype.itemsize == 2
    widest = max(p.D, p.D_v)
    ahead = decodes and widest <= WIDE.value and not page  # with pages it is slower
    if decodes and widest <= 128:
        slow, shared = bandwidth(p.q.device) < FAST_MEMORY, W * p.H_k > multiprocessors(p.q.device)
        # with pages, look-ups take stages of their own
        stages -= slow + shared if ahead else 2 * (slow or shared)
    fields = host_split.planned(
        p, W, tiles.B_r, tiles.B_c, p.layout.invariant, max(least, tiles.B_c), stages, precision(p) or "ieee",
        HOPPER=p.target in HOPPER, PAIRS=paired(p), AHEAD=ahead,
    )  # fmt: skip
    return Plan(*fields, tiles)


def v_in_k(p: Problem) -> bool:
    """Tell whether tiles of K serve as V, which is K's first columns. Smaller heads are measured with tiles of both."""
    return p.within and p.D > WIDE.value and p.target in SHARING


def paired(p: Problem) -> bool:
    """Tell whether neighbours of 8-bit values are read together: q has 16 bits, and rows are at even addresses."""
    even = p.v.aligned and not any(number % 2 for number in (p.D_v, *p.v.stride[:-1]))
    return p.v.dtype.itemsize == 1 and p.dtype.itemsize == 2 and even


def programs(p: Problem, tiles: Tiles) -> int:
    """Return how many programs share a key head's keys: one a multiprocessor, or two where one works while the other
    waits: with 8-bit keys, pieces of a fixed size, several look-ups a tile, or several tiles of rows a program."""
    if p.target == "cpu":
        return 3
    chunk, page, look_ups = p.layout.invariant, p.layout.page(p), p.layout.look_ups(p, tiles.B_c)
    count = multiprocessors(p.q.device)
    W, tiles_of_rows = max(1, count // p.H_k), host_split.row_tiles(p, tiles.B_r)
    # a program waits between tiles of rows, longer with pages
    many = tiles_of_rows >= (1 if page else 8) * W
    two_fit = max(p.D, p.D_v) <= WIDE.value
    if two_fit and (many or chunk or p.k.dtype.itemsize == 1 or p.M * (p.H // p.H_k) > 64 or look_ups > 1):
        W = max(1, 2 * count // p.H_k)
    return host_split.dividing(p, tiles.B_r, W)


def bandwidth(device: torch.device) -> float:
    """Return the most bytes a second of a GPU's memory; infinity where nothing tells."""
    found: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock = getattr(found, "memory_clock_rate", None)  # kHz, of two bits a line; older PyTorch does not know it
    return float("inf") if clock is None else clock * 1e3 * 2 * found.memory_bus_width / 8


def plan_of(p: Problem) -> PassPlan:
    """Return how a forward runs."""
    return host_split.plan_split(p, plan(p), launches, describe)


def launches(p: Problem, pl: Plan, x: Operands, saved: Saved, partial: Tensor) -> list[Launch]:
    """Return the kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does."""
    of_v = None if v_in_k(p) else rows(adjacent(x.v))
    inputs = rows(adjacent(x.q)), rows(adjacent(x.k)), of_v
    scales = scales_of(p.recipe.layout_of(x.extra), p.B, p.H_k)
    constants = {**pl.tiles.options(), **host_split.pdl(pl.split)}
    return host_split.launches_of(p, pl, x, saved, partial, attention_decode, inputs, (scales,), constants)


def describe(p: Problem, pl: Plan) -> list[str]:
    """Describe what runs a problem."""
    words = host_split.describe(p, pl, f"{pl.tiles.warps} warps", p.layout.look_ups(p, pl.tiles.B_c))
    of_v = ["V is read from K's tiles"] * v_in_k(p)
    return words + of_v
