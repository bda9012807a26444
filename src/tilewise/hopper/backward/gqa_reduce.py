"""Add up GQA partial sums of dK and dV, where several programs each loop over some query heads of one key tile.

They finish one after the other. Each adds what it has computed to the sum of those before it, and stores that
for the next. The last one rounds and stores it. So sums have one order, and need the memory of one program's.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts import triton_compat
from ..parts.channel import wait_equal
from .keys import block_of


class GqaSums(NamedTuple):
    """Hold partial sums in memory; None where one program has each key tile to itself."""

    sums: object
    """Hold blocks of B_c keys: dK and dV in fp32 of one group of warps, then of the other."""
    semaphore: object
    """Count, for each half of a block, the programs that have stored their sums."""


@gluon.jit
def by_register(x):
    """Flatten 64 rows in the order in which a warpgroup holds them: four numbers of each thread, of all threads, and so
    on."""
    x = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([x.numel.value])


@gluon.jit
def by_row(x, layout: gl.constexpr):
    """Undo `by_register`."""
    COLUMNS: gl.constexpr = x.shape[0] // 64
    x = x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, COLUMNS])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def add_partials(W: gl.constexpr, parts, keys, gqa_sums, call, tile: gl.constexpr):
    """Add the partial sums of all programs before to group W's parts of dK and dV; return them and whether no program
    follows."""
    GQA_PROGRAMS: gl.constexpr = tile.GQA_PROGRAMS
    if GQA_PROGRAMS == 1:
        return parts, True
    else:
        block = block_of(keys, call, tile)
        at = gqa_sums.sums + (block * 2 + W).to(gl.int64) * (tile.B_C * tile.D)
        semaphore = gqa_sums.semaphore + block * 2 + W
        rank = keys.h // tile.GROUP % GQA_PROGRAMS
        if rank > 0:  # programs before it in this order took their tiles before it, so they run
            wait_equal(semaphore, rank)
            parts = add_all_stored(parts, at)
        if rank < GQA_PROGRAMS - 1:
            store_partials(parts, at)
            triton_compat.barrier()
            gl.atomic_xchg(semaphore, rank + 1, sem="release")
        return parts, rank == GQA_PROGRAMS - 1


@gluon.jit
def add_all_stored(parts, at):
    """Add to all parts what the program before has stored."""
    found, offset = (), 0
    for n in gl.static_range(len(parts)):
        found = found + (add_stored(parts[n], at + offset),)
        offset += parts[n].numel
    return found


@gluon.jit
def add_stored(x, at):
    """Add to a part what the program before has stored of it."""
    layout: gl.constexpr = x.type.layout
    stored = gl.load(at + gl.arange(0, x.numel, by_register(x).type.layout))
    return x + by_row(stored, layout)


@gluon.jit
def store_partials(parts, at):
    """Store all parts for the program that comes next."""
    offset = 0
    for n in gl.static_range(len(parts)):
        store_partial(parts[n], at + offset)
        offset += parts[n].numel


@gluon.jit
def store_partial(x, at):
    """Store a part."""
    x = by_register(x)
    gl.store(at + gl.arange(0, x.numel, x.type.layout), x)
