"""Launches of heads whose score matrix is a single tile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...call.backend import FORWARD, Pass
from ...call.backend import Plan as PassPlan
from ...call.operands import Grads, Operands, Saved
from ...call.problem import Problem, once
from ...host.arguments import (
    adjacent,
    cdiv,
    dropout,
    lengths,
    odd,
    rows,
    unplanned,
    with_adjacent_rows,
    with_contiguous_lse,
)
from ...host.gather import Read, add_sums, addresses, entries_read, gather_of, reads_of, sums_of
from ...host.launch import Launch, current_stream, multiprocessors
from ...host.outputs import empty_grads, empty_saved, sizes
from ...host.plan import Launched, plan_of
from ...host.repeat import Backward, repeated, repeated_backward
from ...host.sink import sink_launches, sink_learns
from ...host.values import device_values
from ...tile.blocks import Tile
from ...tile.gradients import Factors
from ...tile.ranges import Variant
from ..plan import plan as plan_in_tiles
from ..tiles import Tiles, precision, single_tile
from .kernel import Learned, RowValues, Work, attention_backward_single, attention_forward_single

PROGRAMS = 6
"""How many programs for each multiprocessor share the batch entries. Each adds its own sums of what learns."""


@dataclass(frozen=True, eq=False)
class Plan(Launched):
    """Hold what follows from the problem alone."""

    forward: Tiles
    backward: Tiles
    tile: Tile
    c: float | None
    """Is the forward's (triton/plan.py)."""
    factors: Factors
    """Are the backward's; the unit is None with a bias."""
    parts: int
    """Counts the programs of a key head."""


def fits(p: Problem, which: Pass) -> bool:
    """Tell whether the kernels run a pass: there is a row of tiles, and one program gives each sum of what learns."""
    if which is FORWARD or single_tile(p) is None:
        return single_tile(p) is not None
    return all([_summed(p, read) for read in reads_of(p, p.extra)])


def _summed(p: Problem, read: Read) -> bool:
    """Tell whether a read is stored by rows and columns, and one program sums it over all batch entries, or it is of
    one entry and head alone."""
    alone = read.whole and "h" in read.by
    return read.dims is not None and ("h" not in read.by or p.H == p.H_k) and ("b" not in read.by or alone)


@once
def plan(p: Problem) -> Plan:
    """Plan a problem."""
    forward, back = cast("tuple[Tiles, Tiles]", single_tile(p))
    tile = Tile(p.H // p.H_k, p.D, p.D_v, back.B_r, back.B_c, precision(p) or "ieee")
    each = cdiv(p.B, cdiv(PROGRAMS * multiprocessors(p.q.device), p.H_k))
    units = plan_in_tiles(p)
    return Plan(forward, back, tile, units.c, Factors(units.c and units.unit, p.scale, 1.0), cdiv(p.B, each))


def pass_plan(p: Problem, which: Pass) -> PassPlan:
    """Return how the kernels run a pass."""
    tiles = plan(p).forward if which is FORWARD else plan(p).backward

    def describe(p: Problem, pl: Plan) -> list[str]:
        return [f"one tile of {tiles.B_r}x{tiles.B_c} a head, {tiles.in_words}"]

    run, repeat = (forward, repeated) if which is FORWARD else (backward, repeat_backward)
    return plan_of(p, plan(p), run, describe, repeat=repeat)


def repeat_backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor) -> Backward | None:
    """Return what repeats a backward; None where it reads copies."""
    if any([adjacent(t) is not t for t in (*x[:3], do)]):
        return None
    delta = sizes(p)[1] if sink_learns(p) else None
    return repeated_backward(p, pl, (delta,), x, saved, do, empty_sums=partial(empty_sums, p, pl))


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """Compute o and lse."""
    saved = empty_saved(p, x, seed)
    x = with_adjacent_rows(x)
    tensors = [*x[:3], *x.extra, *saved[:3]]
    pl.replays[len(saved.extra)](current_stream(x.q.device), tensors, lambda: forward_launches(p, pl, x, saved))
    return saved


def forward_launches(p: Problem, pl: Plan, x: Operands, saved: Saved) -> Iterator[Launch]:
    """Yield the launch."""
    arguments = (
        *map(rows, (*x[:3], saved.o)), saved.lse, variant_of(p, x, saved.seed), pl.c, *lengths(p), p.H_k,
        Work(odd(p.B), odd(pl.parts)),
    )  # fmt: skip
    constants = {"tile": pl.tile, **pl.forward.options(num_stages=pl.forward.stages)}
    yield Launch(attention_forward_single, p.H_k * pl.parts, arguments, constants, pl.compiled)


def variant_of(p: Problem, x: Operands, seed: Tensor | None) -> Variant:
    """Return the call's values, as kernels take them."""
    parts, changes, sink = device_values(p, x.extra)
    return Variant(parts, changes, dropout(p, seed), None, sink)


def backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """Compute dq, dk, dv, and the gradients that extras need."""
    grads = empty_grads(p, x)
    x = with_adjacent_rows(x)
    do = torch.zeros_like(saved.o) if do is None else adjacent(do)
    saved, dlse = with_contiguous_lse(saved, dlse)
    delta = torch.empty_like(saved.lse) if sink_learns(p) else None
    sums = empty_sums(p, pl, grads)
    tensors = [*x[:3], *x.extra, *saved[:3], do, dlse, delta, *grads[:3], *grads.extra, *sums]
    stream = current_stream(x.q.device)
    replay = pl.replays[unplanned(saved, do, dlse)]
    replay(stream, tensors, lambda: backward_launches(p, pl, x, saved, do, dlse, delta, grads, sums))
    add_sums(p, grads, sums)
    return grads


def empty_sums(p: Problem, pl: Plan, grads: Grads) -> list[Tensor]:
    """Allocate the sums of each program; those without a head are summed over heads, too."""
    reads = reads_of(p, p.extra)
    parts = [1 if "b" in read.by else pl.parts * (1 if "h" in read.by else p.H_k) for read in reads]
    return [sums_of(read, grads, count) for read, count in zip(reads, parts, strict=True)]


def learned_of(p: Problem, x: Operands, read: Read, sums: Tensor) -> Learned:
    """Return what the kernel needs of a tensor that learns."""
    own_rows, own_columns = map(odd, entries_read(p, read))
    return Learned(addresses(read, sums), own_rows, own_columns, gather_of(p, x.extra, read))


def backward_launches(
    p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, delta: Tensor | None,
    grads: Grads, sums: Sequence[Tensor],
) -> Iterator[Launch]:  # fmt: skip
    """Yield the launch, and one for the sink."""
    reads = reads_of(p, p.extra)
    learned = tuple([learned_of(p, x, read, own) for read, own in zip(reads, sums, strict=True)])
    arguments = (
        *map(rows, (*x[:3], saved.o)), RowValues(saved.lse, dlse, delta), rows(do), tuple(map(rows, grads[:3])),
        variant_of(p, x, saved.seed), learned, pl.factors, *lengths(p), p.H_k, Work(odd(p.B), odd(pl.parts)),
    )  # fmt: skip
    ways = tuple([(read.score, *[name in read.by for name in "hijb"]) for read in reads])
    constants = {"ways": ways, "tile": pl.tile, **pl.backward.options(num_stages=pl.backward.stages)}
    key = unplanned(saved, do, dlse), tuple([(own.dtype, own.data_ptr() % 16) for own in sums])
    yield Launch(attention_backward_single, p.H_k * pl.parts, arguments, constants, pl.compiled, key)
    yield from sink_launches(p, pl, x, saved.lse, delta, 1, grads, key)
