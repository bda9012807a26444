"""Launches of the kernels that split keys: arguments follow from shapes, not from what lengths hold."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.backend import Plan as PassPlan
from ...call.operands import Operands, Saved
from ...call.problem import Problem, once
from ...host import split as host_split
from ...host.arguments import adjacent, cdiv, device_values, power_of_2, rows, scales_of
from ...host.launch import Launch, multiprocessors
from ...host.replay import Replay
from ...tile.line import Split
from ..tiles import HOPPER, Tiles, decode_tiles, precision
from .kernel import attention_decode

LEAST = 64
"""The fewest keys that a program takes."""
FAST_MEMORY = 4e12
"""Below these bytes a second (H100: 3.4e12), keys are read faster with fewer loads in flight, as they are where two
programs share a multiprocessor."""


class Plan(NamedTuple):
    """The parts of a launch that follow from the problem alone."""

    tiles: Tiles
    split: Split
    programs: int
    """The programs of each key head."""
    c: float
    """Logits times c are in base 2."""
    partial: int
    """Numbers of all partial sums; 0 if there are none."""
    values: tuple[Any, Any, Tensor | None] | None
    """The mask's parts and the scores as kernel arguments; None if the call has extra tensors."""
    compiled: dict[Any, Any]
    replay: Replay


@once
def plan(p: Problem) -> Plan:
    """Plan a problem with its row of tile sizes."""
    tiles = decode_tiles(p)
    return planned(p, tiles, programs(p, tiles))


def planned(p: Problem, tiles: Tiles, W: int, least: int = LEAST) -> Plan:
    """Plan a problem with the given row, and W programs for each key head."""
    chunk, G, page = p.layout.invariant, p.H // p.H_k, p.layout.page(p) or 0
    stages = tiles.stages if page else (tiles.stages + 1) // 2
    decodes = p.target in HOPPER and tiles.B_r == 16 and p.k.dtype.itemsize == 2
    ahead = decodes and not page  # with pages it is slower
    if decodes and max(p.D, p.D_v) <= 128:
        slow, shared = bandwidth(p.q.device) < FAST_MEMORY, W * p.H_k > multiprocessors(p.q.device)
        # with pages, look-ups take stages of their own
        stages -= slow + shared if ahead else 2 * (slow or shared)
    split = Split(
        G, p.D, p.D_v, page, tiles.B_r, tiles.B_c, chunk, power_of_2(max(1, p.B)), max(least, tiles.B_c),
        stages, precision(p) or "ieee", p.target in HOPPER, paired(p), ahead,
    )  # fmt: skip
    values = None if p.extra else device_values(p, ())
    return Plan(tiles, split, W, host_split.unit(p), host_split.numbers(p, split, W), values, {}, Replay())


def paired(p: Problem) -> bool:
    """Tell whether neighbours of 8-bit values are read together: q has 16 bits, and rows are at even addresses."""
    even = p.v.aligned and not any(number % 2 for number in (p.D_v, *p.v.stride[:-1]))
    return p.v.dtype.itemsize == 1 and p.dtype.itemsize == 2 and even


def programs(p: Problem, tiles: Tiles) -> int:
    """Return how many programs share a key head's keys: one a multiprocessor, or two where one works while the other
    waits: with 8-bit keys, pieces of a fixed size, several look-ups a tile, or several tiles of rows a program."""
    if p.target == "cpu":
        return 3
    chunk, count = p.layout.invariant, multiprocessors(p.q.device)
    W, tiles_of_rows = max(1, count // p.H_k), host_split.row_tiles(p, tiles.B_r)
    # a program waits between tiles of rows, longer with pages
    many = tiles_of_rows >= (1 if p.layout.page(p) else 8) * W
    if many or chunk or p.k.dtype.itemsize == 1 or p.M * (p.H // p.H_k) > 64 or look_ups(p, tiles) > 1:
        W = max(1, 2 * count // p.H_k)
    return host_split.dividing(p, tiles.B_r, W)


def bandwidth(device: torch.device) -> float:
    """Return the most bytes a second of a GPU's memory; infinity where nothing tells."""
    found: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock = getattr(found, "memory_clock_rate", None)  # kHz, of two bits a line; older PyTorch does not know it
    return float("inf") if clock is None else clock * 1e3 * 2 * found.memory_bus_width / 8


def look_ups(p: Problem, tiles: Tiles) -> int:
    """Return how many pages are looked up for a tile of keys."""
    if not (page := p.layout.page(p)):
        return 0
    return 1 if page % tiles.B_c == 0 and p.layout.starts is None else cdiv(tiles.B_c, page)


def plan_of(p: Problem) -> PassPlan:
    """Return how a forward runs."""
    return host_split.plan_split(p, plan(p), launches, describe)


def launches(p: Problem, pl: Plan, x: Operands, saved: Saved, partial: Tensor) -> list[Launch]:
    """Return the kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does."""
    outputs, batch, variant = host_split.arguments_of(p, pl, x, saved)
    inputs, scales = [rows(adjacent(t)) for t in x[:3]], scales_of(p.recipe.layout_of(x.extra), p.B, p.H_k)
    arguments = (*inputs, *outputs, partial, batch, variant, scales, pl.c, p.H_k, pl.programs)
    cap = {} if pl.tiles.registers is None else {"maxnreg": pl.tiles.registers}
    pdl = {"launch_pdl": True} if pl.split.HOPPER else {}
    constants = {"num_warps": pl.tiles.warps, **cap, "split": pl.split, **pdl}
    decode = Launch(attention_decode, pl.programs * p.H_k, arguments, constants, pl.compiled)
    return [decode, *host_split.combine(p, pl, outputs, partial, batch, variant)]


def describe(p: Problem, pl: Plan) -> tuple[str, ...]:
    """Describe what runs a problem."""
    tiles, split, W, _, partial, *_ = pl
    sums = f"at most {2 * W} partial sums" if partial else "no partial sums"
    parts = [
        f"forward splits keys, {tiles.B_r} rows of {split.G} heads x {tiles.B_c} keys, {tiles.warps} warps, "
        f"{split.STAGES} stages",
        f"{W} programs for each of {p.H_k} key heads",
        f"pieces of {split.CHUNK} keys" if split.CHUNK else sums,
    ]
    if looked := look_ups(p, tiles):
        parts.append(f"pages of {split.P}, {looked} look-up{'s' * (looked > 1)} a tile")
    return tuple(parts)
