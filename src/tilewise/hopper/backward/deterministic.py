"""Accumulate dQ in a fixed order for deterministic gradients: key tiles add to a sum one by one, the last of them
first.

A semaphore in memory names the key tile that may add next. It is written by a release and read by an acquire; what TMA
has added is complete before and fenced after. That takes longer than one iteration over a query tile, so two
of them share a semaphore where they can.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.ranges import query_range
from ...tile.rows import first_block, rows_of
from ..parts.channel import fence_async_global, wait_equal, wait_reductions


@triton.jit(do_not_specialize=["packed", "variant", "M", "N", "H", "tiles", "stride"])
def attention_backward_init_semaphore(
    dq_semaphore,
    packed,
    variant,
    M,
    N,
    H,
    tiles,
    stride,
    B_R: tl.constexpr,
    B_C: tl.constexpr,
    SEMAPHORE_TILES: tl.constexpr,
):
    """Set every semaphore to the key tile that adds to its dQ first: the last one whose loop reaches it."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    q0, M, _, N = rows_of(packed, b, M, N)
    if t * B_C >= N:
        return
    first = first_block(packed, b, h, H, q0, stride, B_R)
    begin, end = semaphore_range(variant, b, t, M, N, B_R, B_C, SEMAPHORE_TILES)
    for slot in range(begin, end):
        tl.atomic_max(dq_semaphore + first + slot * SEMAPHORE_TILES, t)


@triton.jit
def semaphore_range(variant, b, t, M, N, B_R: tl.constexpr, B_C: tl.constexpr, SEMAPHORE_TILES: tl.constexpr):
    """Return the semaphores [begin, end) of the query tiles to which a key tile adds. There are
    none where a mask hides its keys from every row: the interval may then lie outside."""
    lo, _, _, hi = query_range(variant, 0, b, t * B_C, M, N, B_R, B_C)
    begin = lo // SEMAPHORE_TILES
    return begin, tl.where(lo < hi, tl.cdiv(hi, SEMAPHORE_TILES), begin)


@gluon.jit
def wait_dq_semaphore(dq_semaphore, block, step, keys, tile: gl.constexpr):
    """Wait until this key tile may add to an iteration's query tile, which is `block` of all. Its position is its
    number in the head: masks with listed tiles are refused."""
    n = step.x % tile.SEMAPHORE_TILES
    if (n == 0) | (step.x == step.loop.lo):
        wait_equal(dq_semaphore + block - n, keys.t)
        fence_async_global()


@gluon.jit
def release_dq_semaphore(dq_semaphore, block, step, keys, variant, tile: gl.constexpr):
    """After an iteration's add, let the next lower key tile add whose loop reaches this semaphore; if there is none,
    store -1."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    SEMAPHORE_TILES: gl.constexpr = tile.SEMAPHORE_TILES
    n = step.x % SEMAPHORE_TILES
    if (n == SEMAPHORE_TILES - 1) | (step.x == step.loop.hi - 1):
        wait_reductions()
        slot = step.x // SEMAPHORE_TILES
        t = keys.t
        found = False
        while (t >= 0) & ~found:
            t -= 1
            begin, end = semaphore_range(variant, keys.b, t, keys.M, keys.N, B_R, B_C, SEMAPHORE_TILES)
            found = (begin <= slot) & (slot < end)
        gl.atomic_xchg(dq_semaphore + block - n, t, sem="release")
