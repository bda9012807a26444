"""Run the warp that adds blocks of dQ to their sums in memory, by TMA, as groups of warps compute them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...tile.schedule import assign
from ..parts import triton_compat
from ..parts.channel import (
    fence_async_global,
    launch_dependents,
    wait_dependencies,
    wait_equal,
    wait_reductions,
)
from ..parts.queue import receive_tile
from .deterministic import release_dq_semaphore, wait_dq_semaphore
from .keys import exists, first_step, keys_of, next_step, query_block


@gluon.jit
def zero_next_dq(scratch, t, shape, tile: gl.constexpr):
    """Zero a part of the next section's dQ, which is still in the cache when it is added to. Then wait until all zeros
    of this tile's own matrix are there, from earlier tiles, or from the kernel before."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    zero = gl.zeros([1024], gl.float32, layout)
    count = tile.GROUP * shape.blocks * (tile.B_R * tile.D // 1024)
    section = shape.section * shape.tiles
    if t + section < shape.tiles * shape.heads:
        matrix, part = assign(t + section, shape.tiles, shape.heads, shape.section)  # one part for each tile
        each = gl.cdiv(count, shape.tiles)
        for n in range(part * each, gl.minimum((part + 1) * each, count)):
            gl.store(scratch.dq + (matrix.to(gl.int64) * count + n) * 1024 + gl.arange(0, 1024, layout), zero)
        fence_async_global()
        triton_compat.barrier()
        gl.atomic_add(scratch.ready + matrix, 1, sem="release")
    matrix, _ = assign(t, shape.tiles, shape.heads, shape.section)
    if matrix >= shape.section:
        wait_equal(scratch.ready + matrix, shape.tiles)
        fence_async_global()


@gluon.jit
def count_done(done, keys, shape, tile: gl.constexpr):
    """Tell the postprocess kernel that this key tile has added all that it adds to dQ."""
    wait_reductions()
    gl.atomic_add(done + keys.b * shape.H + keys.h, 1, sem="release")


@gluon.constexpr_function
def rows_of_sums(tile):
    """Count the rows of 256 sums in a query tile's dQ."""
    return tile.D * tile.B_R // 256


@gluon.jit
def add_block(dQ, row, memory, ROWS: gl.constexpr):
    """Start to add a block's ROWS to the sums from `row` on, in boxes of TMA."""
    IN_BOX: gl.constexpr = dQ.block_type.shape[0]
    for r in gl.static_range(ROWS // IN_BOX):
        triton_compat.reduce_add(dQ, [row + r * IN_BOX, 0], memory.slice(r * IN_BOX, IN_BOX, 0))


@gluon.jit
def add_blocks(dQ, row, y, shared, tile: gl.constexpr):
    """Add both groups' blocks of a query tile, to rows from `row` on; or both to the same rows, if it is a single
    block."""
    ROWS: gl.constexpr = rows_of_sums(tile)
    for w in gl.static_range(2):
        mbarrier.wait(shared.dq.full.index(w), y & 1)
        add_block(dQ, row + 16 * w % ROWS, shared.dq.memory.index(w), min(16, ROWS - 16 * w % ROWS))
        if tile.SEMAPHORE_TILES and ROWS == 16:
            wait_reductions()
    tma.store_wait(1)
    mbarrier.arrive(shared.dq.empty.index(0))
    tma.store_wait(0)
    mbarrier.arrive(shared.dq.empty.index(1))


@gluon.jit
def add_dq(dQ, scratch, shared, call, tile: gl.constexpr):
    """Run the writer warp: add each group's blocks of dQ as they come, or in order where dQ is deterministic."""
    ROWS: gl.constexpr = rows_of_sums(tile)
    y = 0
    n = 0
    wait_dependencies()  # for zeros in dQ
    launch_dependents()  # only now: postprocess reads counts that were set to zero there
    t = receive_tile(shared.tile_ids, n, 1)
    while t < call.shape.tiles * call.shape.heads:
        if scratch.ready is not None:
            zero_next_dq(scratch, t, call.shape, tile)
        keys = keys_of(t, call, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            block = query_block(step, keys, call, tile)
            if tile.SEMAPHORE_TILES:
                wait_dq_semaphore(scratch.dq_semaphore, block, step, keys, tile)
            add_blocks(dQ, block * ROWS, y, shared, tile)
            y += 1
            if tile.SEMAPHORE_TILES:
                release_dq_semaphore(scratch.dq_semaphore, block, step, keys, call.variant, tile)
            step = next_step(step, keys, call.variant, tile)
        count_done(scratch.done, keys, call.shape, tile)
        n += 1
        t = receive_tile(shared.tile_ids, n, 1)
