"""Launches of the kernels that split keys: arguments follow from shapes, not from what lengths hold."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..host.launch import (
    Launch,
    adjacent,
    batch_of,
    cdiv,
    current_stream,
    device_values,
    empty,
    empty_saved,
    multiprocessors,
    rows,
    rows_of_lse,
    scales_of,
    total_rows,
)
from ..host.replay import Replay
from ..problem import Operands, Problem, Saved
from ..tile.line import Split
from ..tile.ranges import Variant
from ..tile.softmax import LOG2E
from .decode import attention_combine, attention_decode
from .tiles import HOPPER, Tiles, decode_tiles, precision

TINY = 2.0**-126
power_of_2: Any = triton.next_power_of_2
LEAST = 64
"""The fewest keys that a program takes."""
COMBINED = 16
"""Partial sums that are added at a time."""
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
    most: int | None
    """The most queries of a packed sequence that is summed, or None."""
    values: tuple[Any, Any, Tensor | None] | None
    """The mask's parts and the scores as kernel arguments; None if the call has extra tensors."""
    compiled: dict[Any, Any]
    replay: Replay


@lru_cache(4096)
def plan(p: Problem, most: int | None = None) -> Plan:
    """Plan a problem with its row of tile sizes, without sequences of more than `most` queries."""
    tiles = decode_tiles(p)
    return planned(p, tiles, programs(p, tiles), most=most)


def planned(p: Problem, tiles: Tiles, W: int, least: int = LEAST, most: int | None = None) -> Plan:
    """Plan a problem with the given row, and W programs for each key head."""
    chunk = p.recipe.layout[2] if p.recipe.cached else 0
    G = p.H // p.H_k
    page = p.k.shape[1] if p.in_layout("table") is not None else 0
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
    slots = total_rows(p) * G * (cdiv(p.N, chunk) + 1) if chunk else 0 if whole(p, split, W) else 2 * W * tiles.B_r
    c = (1.0 if p.recipe.score else max(p.scale, TINY)) * LOG2E.value
    return Plan(tiles, split, W, c, slots * p.H_k * (p.D_v + 2), most, values, {}, Replay())


def paired(p: Problem) -> bool:
    """Tell whether neighbours of 8-bit values are read together: q has 16 bits, and rows are at even addresses."""
    even = p.v.aligned and not any(number % 2 for number in (p.D_v, *p.v.stride[:-1]))
    return p.v.dtype.itemsize == 1 and p.dtype.itemsize == 2 and even


def programs(p: Problem, tiles: Tiles) -> int:
    """Return how many programs share a key head's keys: one a multiprocessor, or two where one works while the other
    waits: with 8-bit keys, pieces of a fixed size, several look-ups a tile, or several tiles of rows a program. If
    a slightly smaller number divides the sequences, it is that: each program takes whole ones where all are equal."""
    if p.target == "cpu":
        return 3
    chunk, count = p.recipe.cached and p.recipe.layout[2], multiprocessors(p.q.device)
    W, tiles_of_rows = max(1, count // p.H_k), row_tiles(p, tiles.B_r)
    # a program waits between tiles of rows, longer with pages
    many = tiles_of_rows >= (8 if p.in_layout("table") is None else 1) * W
    if many or chunk or p.k.dtype.itemsize == 1 or p.M * (p.H // p.H_k) > 64 or look_ups(p, tiles) > 1:
        W = max(1, 2 * count // p.H_k)
    return next((w for w in range(W, W - W // 8, -1) if tiles_of_rows == p.B and p.B % w == 0), W)


def bandwidth(device: torch.device) -> float:
    """Return the most bytes a second of a GPU's memory; infinity where nothing tells."""
    found: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    clock = getattr(found, "memory_clock_rate", None)  # kHz, of two bits a line; older PyTorch does not know it
    return float("inf") if clock is None else clock * 1e3 * 2 * found.memory_bus_width / 8


def row_tiles(p: Problem, B_r: int) -> int:
    """Return how many tiles of rows a key head has, at most."""
    return p.B * cdiv(p.M * (p.H // p.H_k), B_r)


def whole(p: Problem, split: Split, W: int) -> bool:
    """Tell whether programs sum whole tiles of rows alone: all have as many keys, and each program as many tiles."""
    count = row_tiles(p, split.B_R)
    return not p.extra and not p.recipe.cached and count % W == 0 and count * split.B_C >= W * split.LEAST


def look_ups(p: Problem, tiles: Tiles) -> int:
    """Return how many pages are looked up for a tile of keys."""
    if p.in_layout("table") is None:
        return 0
    page = p.k.shape[1]
    return 1 if page % tiles.B_c == 0 and p.in_layout("starts") is None else cdiv(tiles.B_c, page)


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """Compute o and lse."""
    saved = empty_saved(p, x, seed)
    if 0 in (p.B, total_rows(p)):
        saved.o.zero_()
        saved.lse.fill_(-torch.inf)
        return saved
    write_sums(p, pl, x, saved)
    return saved


def write_sums(p: Problem, pl: Plan, x: Operands, saved: Saved) -> None:
    """Write the rows of o and lse that a plan sums."""
    device = x.q.device
    stream, partial = current_stream(device), empty(((pl.partial,), (1,), torch.float32), device)
    tensors = *x[:3], *x.extra, saved.o, saved.lse, partial
    pl.replay(stream, tensors, lambda: launches(p, pl, x, saved, partial))


def launches(p: Problem, pl: Plan, x: Operands, saved: Saved, partial: Tensor) -> list[Launch]:
    """Return the kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does."""
    parts, changes, sink = pl.values or device_values(p, x.extra)
    variant, batch = Variant(parts, changes, None, None, sink), batch_of(p, x, most=pl.most)
    outputs, inputs = (rows(saved.o), rows_of_lse(saved.lse)), [rows(adjacent(t)) for t in x[:3]]
    scales = scales_of(lambda name: p.in_layout(name, x.extra), p.B, p.H_k)
    arguments = (*inputs, *outputs, partial, batch, variant, scales, pl.c, p.H_k, pl.programs)
    cap = {} if pl.tiles.registers is None else {"maxnreg": pl.tiles.registers}
    both = {"split": pl.split, **({"launch_pdl": True} if pl.split.HOPPER else {})}
    constants = {"num_warps": pl.tiles.warps, **cap, **both}
    decode = Launch(attention_decode, pl.programs * p.H_k, arguments, constants, pl.compiled)
    if not pl.partial:
        return [decode]
    arguments = (*outputs, partial, batch, variant, p.H_k, pl.programs)
    constants = {"B_X": COMBINED, "num_warps": cdiv(p.D_v, 128), **both}
    return [decode, Launch(attention_combine, total_rows(p) * p.H, arguments, constants, pl.compiled)]


def told(p: Problem) -> str:
    """Describe what runs a problem, for `explain`."""
    tiles, split, W, _, partial, *_ = plan(p)
    sums = f"at most {2 * W} partial sums" if partial else "no partial sums"
    parts = [
        f"splits keys, {tiles.B_r} rows of {split.G} heads x {tiles.B_c} keys, {tiles.warps} warps, "
        f"{split.STAGES} stages",
        f"{W} programs for each of {p.H_k} key heads",
        f"pieces of {split.CHUNK} keys" if split.CHUNK else sums,
    ]
    if looked := look_ups(p, tiles):
        parts.append(f"pages of {split.P}, {looked} look-up{'s' * (looked > 1)} a tile")
    return "; ".join(parts)
