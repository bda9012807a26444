"""Turns for deterministic gradients: tiles of keys add to a sum of dQ in a fixed order, the last of them first.

A number in memory says whose turn it is. It is handed on by a release and taken by an acquire, with what TMA has added
complete before and fenced after. That takes longer than a visit of a query tile, so most turns are at two of them.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.rows import rows_of
from ...tile.visits import query_range
from ..parts.channel import fence_async_global, until, wait_added
from ..parts.row_blocks import first_block


@triton.jit(do_not_specialize=["packed", "variant", "M", "N", "H", "tiles", "stride"])
def give_turns(
    turns, packed, variant, M, N, H, tiles, stride, B_R: tl.constexpr, B_C: tl.constexpr, TURN: tl.constexpr
):
    """For every turn of query tiles the last key tile whose walk comes by: the first to add to its dQ."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    q0, M, _, N = rows_of(packed, b, M, N)
    if t * B_C >= N:
        return
    first = first_block(packed, b, h, H, q0, stride, B_R)
    begin, end = turns_of(variant, b, t, M, N, B_R, B_C, TURN)
    for turn in range(begin, end):
        tl.atomic_max(turns + first + turn * TURN, t)


@triton.jit
def turns_of(variant, b, t, M, N, B_R: tl.constexpr, B_C: tl.constexpr, TURN: tl.constexpr):
    """The turns [begin, end) at which a tile of keys adds; none where a mask hides its keys from every row, whose
    interval may then lie far outside."""
    lo, _, _, hi = query_range(variant, 0, b, t * B_C, M, N, B_R, B_C)
    begin = lo // TURN
    return begin, tl.where(lo < hi, tl.cdiv(hi, TURN), begin)


@gluon.jit
def wait_turn(turns, block, visit, keys, tile: gl.constexpr):
    """Until a visit's query tile, which is `block` of all, may be added to. Its position is its number in the head:
    masks with listed tiles are refused."""
    n = visit.x % tile.TURN
    if (n == 0) | (visit.x == visit.walk.lo):
        until(turns + block - n, keys.t)
        fence_async_global()


@gluon.jit
def hand_turn_on(turns, block, visit, keys, variant, tile: gl.constexpr):
    """After what a visit adds: to the next before this tile of keys whose walk comes by, or to nobody."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    TURN: gl.constexpr = tile.TURN
    n = visit.x % TURN
    if (n == TURN - 1) | (visit.x == visit.walk.hi - 1):
        wait_added()
        turn = visit.x // TURN
        t = keys.t
        there = False
        while (t >= 0) & ~there:
            t -= 1
            begin, end = turns_of(variant, keys.b, t, keys.M, keys.N, B_R, B_C, TURN)
            there = (begin <= turn) & (turn < end)
        gl.atomic_xchg(turns + block - n, t, sem="release")
