"""Add up GQA partial sums of dK and dV, where several programs each loop over some query heads of one key tile.

They finish one after the other. Each adds what it has computed to the sum of those before it, in memory, and leaves
that to the next. The last one rounds and stores it. So sums have one order, and need the memory of one program's.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts import triton_compat
from ..parts.channel import until
from .keys import block_of


class Shares(NamedTuple):
    """Hold the partial sums that programs leave to the next; None where each has its keys to itself."""

    sums: object
    """Hold blocks of B_c keys: dK and dV in fp32 of one group of warps, then of the other."""
    turns: object
    """Count, for each half of a block, the programs that have left their sums."""


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
def with_shares(W: gl.constexpr, parts, keys, shares, shape, packed, tile: gl.constexpr):
    """Add the partial sums of all programs before to group W's parts of dK and dV; return them and whether no program
    follows."""
    SHARES: gl.constexpr = tile.SHARES
    if SHARES == 1:
        return parts, True
    else:
        block = block_of(keys, shape, packed, tile)
        at = shares.sums + (block * 2 + W).to(gl.int64) * (tile.B_C * tile.D)
        turn = shares.turns + block * 2 + W
        share = keys.h // tile.GROUP % SHARES
        if share > 0:  # programs before it in this order drew their tiles before it, so they run
            until(turn, share)
            parts = all_with_left(parts, at)
        if share < SHARES - 1:
            for n in gl.static_range(len(parts)):
                leave(parts[n], at + n * parts[n].numel)
            triton_compat.barrier()
            gl.atomic_xchg(turn, share + 1, sem="release")
        return parts, share == SHARES - 1


@gluon.jit
def all_with_left(parts, at):
    """Add to all parts what the program before has left."""
    found = ()
    for n in gl.static_range(len(parts)):
        found = found + (with_left(parts[n], at + n * parts[n].numel),)
    return found


@gluon.jit
def with_left(x, at):
    """Add to a part what the program before has left of it."""
    layout: gl.constexpr = x.type.layout
    left = gl.load(at + gl.arange(0, x.numel, by_register(x).type.layout))
    return x + by_row(left, layout)


@gluon.jit
def leave(x, at):
    """Store a part for the program that comes next."""
    x = by_register(x)
    gl.store(at + gl.arange(0, x.numel, x.type.layout), x)
