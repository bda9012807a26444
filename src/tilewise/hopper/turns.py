"""Turns for deterministic gradients: tiles of keys add to a sum of dQ in a fixed order, the last of them first.

A number in memory says whose turn it is. It is handed on by a release and taken by an acquire, with what TMA has added
complete before and fenced after. That takes longer than a visit of a query tile, so most turns are at two of them.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tile.rows import rows_of
from ..tile.visits import query_range
from .around import first_block
from .channel import fence_async_global, until, wait_added


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
    lo, _, _, hi = query_range(variant, 0, b, t * B_C, M, N, B_R, B_C)
    first = first_block(packed, b, h, H, q0, stride, B_R)
    for m in range(lo // TURN * TURN, hi, TURN):
        tl.atomic_max(turns + first + m, t)


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
        m = visit.x - n
        t = keys.t
        there = False
        while (t >= 0) & ~there:
            t -= 1
            lo, _, _, hi = query_range(variant, 0, keys.b, t * B_C, keys.M, keys.N, B_R, B_C)
            there = (lo < m + TURN) & (m < hi)
        gl.atomic_xchg(turns + block - n, t, sem="release")
