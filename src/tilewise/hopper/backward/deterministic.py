"""Accumulate dQ in a fixed order for deterministic gradients: key tiles add to a sum one by one, the last of them
first.

A number in memory names the key tile that may add next. It is passed on by a release and taken by an acquire; what TMA
has added is complete before and fenced after. That takes longer than one iteration over a query tile, so most steps of
the order cover two of them. Such a step is a `turn`.
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
    """Set, for every turn of query tiles, the key tile that adds to its dQ first: the last one whose loop reaches
    it."""
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
    """Return the turns [begin, end) in which a key tile adds. There are none where a mask hides its keys from every
    row, whose interval may then lie far outside."""
    lo, _, _, hi = query_range(variant, 0, b, t * B_C, M, N, B_R, B_C)
    begin = lo // TURN
    return begin, tl.where(lo < hi, tl.cdiv(hi, TURN), begin)


@gluon.jit
def wait_turn(turns, block, visit, keys, tile: gl.constexpr):
    """Wait until this key tile may add to an iteration's query tile, which is `block` of all. Its position is its
    number in the head: masks with listed tiles are refused."""
    n = visit.x % tile.TURN
    if (n == 0) | (visit.x == visit.walk.lo):
        until(turns + block - n, keys.t)
        fence_async_global()


@gluon.jit
def hand_turn_on(turns, block, visit, keys, variant, tile: gl.constexpr):
    """After an iteration's add, let the next lower key tile add whose loop reaches this turn; if there is none, store
    -1."""
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
