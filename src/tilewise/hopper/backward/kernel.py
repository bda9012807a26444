"""Compute dK, dV and sums of dQ on Hopper: the backward's main kernel.

A program owns B_c rows of K and V, and loops over the query tiles that see them.

    load          one warp        loads K and V once, then Q, L, dO and D of every query tile, by TMA
    add_dq        one warp        adds finished 64 x 64 blocks of dQ to their sum in memory, by TMA, and writes the
                                  zeros that later key tiles will add to
    compute       2 x 4 warps     computes the five products: see gradients.py, split_dkdv.py
    produce_bits  2 or 4 warps    with dropout only: generates its mask bits

All of them loop over the same query tiles, which keys.py finds.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...tile.schedule import assign
from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    fence_async_global,
    launch_dependents,
    stage,
    wait_before,
    wait_dependencies,
    wait_equal,
    wait_reductions,
)
from ..parts.dropout_bits import bits, dropout_words, in_whole
from ..parts.pieces import allocate, bytes_of, load_pieces
from ..parts.queue import fetch_tile, receive_tile, reset_counter, send_tile, skip_to, tile_channel
from .deterministic import release_dq_semaphore, wait_dq_semaphore
from .gradients import key_half
from .keys import exists, first_step, keys_of, next_step, place_of, query_block, tile_of
from .outputs import Gradient
from .split_dkdv import blocks_of_dq, dk_group, dv_group


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants."""

    B_R: int
    B_C: int
    D: int
    """Counts the columns of a row of Q or K in shared memory, which lie in pieces (parts/pieces.py)."""
    D_V: int
    """Counts those of a row of V or dO."""
    K_STAGES: int
    """With two, the next K and V come once V has been read for the last time; with one, once K has."""
    Q_STAGES: int
    DO_STAGES: int
    SPLIT_DKDV: bool
    """Says whether one group owns dV and the other dK (dK/dV split), rather than each half of the keys. Only then may V
    have other columns."""
    HALF_LOOPS: bool
    """Says whether each group loops only over what its own keys see."""
    MASK_IN_LOOP: bool
    """Says whether other query tiles than the first may need the mask."""
    SEMAPHORE_TILES: int
    """Counts the query tiles that share a semaphore (see deterministic.py), with which dQ repeats bit by bit. At 0, key
    tiles add as they come."""
    GROUP: int
    """Counts the query heads that one program loops over."""
    GQA_PROGRAMS: int
    """Counts the programs of each key tile; their partial sums are added (see gqa_reduce.py)."""
    TWO_LOOPS: bool
    """Says whether iterations without a mask have a loop to themselves; then all others apply it."""
    DROPOUT_WARPS: int
    """Counts the warps that generate dropout bits; without dropout it is 0."""


class Shape(NamedTuple):
    """Hold factors, lengths and counts of a launch; for packed sequences, M and N count all rows."""

    unit: object
    """Turns logits into base 2."""
    factor: object
    """Is the scale of the logits, which dQ and dK take."""
    M: object
    N: object
    d: object
    d_v: object
    H: object
    blocks: object
    """Counts the query tiles of a head in the sums of dQ."""
    heads: object
    section: object
    tiles: object
    key_tiles: object
    """Counts the key tiles of a head in the GQA partial sums."""


class Shared(NamedTuple):
    """Hold everything in shared memory."""

    k: object
    v: object
    kv: object
    """Holds the barriers of both K and V; see `Tile.K_STAGES`."""
    q: object
    logs: object
    do: object
    delta: object
    ds: object
    dq: object
    p: object
    tile_ids: object
    bits: object
    """Holds the channel of dropout bits, or None."""
    shift: object
    """Holds what logits are shifted by, beside `logs`, or None."""


@gluon.jit
def load(Q, K, V, dO, L, D, shared, counter, call, tile: gl.constexpr):
    """Run the producer warp."""
    B_R: gl.constexpr = tile.B_R
    n = 0  # tiles of keys so far
    y = 0  # tiles of queries so far
    t = fetch_tile(counter)
    wait_dependencies()  # for L and D
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        if keys.j0 < keys.N:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            b = keys.b if call.packed is None else 0
            wait_before(shared.kv.empty, n)
            bar = expect(shared.kv.full, n, bytes_of(K.block_type, tile.D) + bytes_of(V.block_type, tile.D_V))
            load_pieces(K, b, keys.h_k, keys.k0 + keys.j0, bar, shared.k, n % tile.K_STAGES)
            load_pieces(V, b, keys.h_k, keys.k0 + keys.j0, bar, shared.v, 0)
            n += 1
            step = first_step(keys, call.variant, tile)
            while exists(step):
                m = tile_of(step, keys, call.variant)
                first = keys.q0 + m * B_R
                row = query_block(step, keys, call, tile) * B_R
                wait_before(shared.q.empty, y)
                OF_Q: gl.constexpr = bytes_of(Q.block_type, tile.D)
                bar = expect(shared.q.full, y, OF_Q + (4 if shared.shift is None else 8) * B_R)
                load_pieces(Q, b, step.h, first, bar, shared.q.memory, y % tile.Q_STAGES)
                triton_compat.load(L, [row], bar, stage(shared.logs, y))
                if shared.shift is not None:  # they lie behind all of L
                    all_rows = call.shape.blocks * call.shape.heads * tile.GROUP * B_R
                    triton_compat.load(L, [all_rows + row], bar, stage(shared.shift, y))
                wait_before(shared.do.empty, y)
                bar = expect(shared.do.full, y, bytes_of(dO.block_type, tile.D_V) + 4 * B_R)
                load_pieces(dO, b, step.h, first, bar, shared.do.memory, y % tile.DO_STAGES)
                triton_compat.load(D, [row], bar, stage(shared.delta, y))
                y += 1
                step = next_step(step, keys, call.variant, tile)
        elif tile.SEMAPHORE_TILES == 0:  # nor are there any tiles until the next section
            skip_to(counter, (t // (call.shape.section * call.shape.tiles) + 1) * call.shape.section * call.shape.tiles)
        t = fetch_tile(counter)
    send_tile(shared.tile_ids, t, n)
    reset_counter(counter)


@gluon.jit
def produce_bits(shared, call, tile: gl.constexpr):
    """Generate dropout bits once a tile. Each group reads those of its keys; with the dK/dV split, each reads all."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    seed = gl.load(call.variant.dropout.seed)
    threshold = gl.to_tensor(call.variant.dropout.threshold).to(gl.uint32)
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            place = place_of(step, keys, call, B_R)
            matrix, i0, j0 = in_whole(call.variant.dropout.counters, place, place.i0, keys.j0)
            words = dropout_words(seed, threshold, matrix, i0, j0, B_C, B_R, True, DROPOUT_WARPS)
            wait_before(shared.bits.empty, y)
            stage(shared.bits.memory, y).store(words)
            arrive(shared.bits.full, y)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        n += 1
        t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)


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


@gluon.jit
def add_block(dQ, row, memory, ROWS: gl.constexpr):
    """Start to add a block's ROWS to the sums from `row` on, in boxes of TMA."""
    IN_BOX: gl.constexpr = dQ.block_type.shape[0]
    for r in gl.static_range(ROWS // IN_BOX):
        triton_compat.reduce_add(dQ, [row + r * IN_BOX, 0], memory.slice(r * IN_BOX, IN_BOX, 0))


@gluon.jit
def add_dq(dQ, scratch, shared, call, tile: gl.constexpr):
    """Run the writer warp: add each group's blocks of dQ as they come, or in order where dQ is deterministic."""
    ROWS: gl.constexpr = tile.D * tile.B_R // 256  # of sums in a query tile; if 16, both groups add to all
    FIRST: gl.constexpr = blocks_of_dq(0, tile)
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
            for n_dq in gl.static_range(blocks_of_dq(1, tile)):
                for w in gl.static_range(0 if n_dq < FIRST else 1, 2):
                    mbarrier.wait(shared.dq.full.index(w), y * blocks_of_dq(w, tile) + n_dq & 1)
                    row = block * ROWS + 16 * (w * FIRST + n_dq) % ROWS
                    add_block(dQ, row, shared.dq.memory.index(w), min(16, ROWS - 16 * (w * FIRST + n_dq) % ROWS))
                    if tile.SEMAPHORE_TILES and ROWS == 16:
                        wait_reductions()
                if n_dq < FIRST:
                    tma.store_wait(1)
                    mbarrier.arrive(shared.dq.empty.index(0))
                tma.store_wait(0)
                mbarrier.arrive(shared.dq.empty.index(1))
            y += 1
            if tile.SEMAPHORE_TILES:
                release_dq_semaphore(scratch.dq_semaphore, block, step, keys, call.variant, tile)
            step = next_step(step, keys, call.variant, tile)
        count_done(scratch.done, keys, call.shape, tile)
        n += 1
        t = receive_tile(shared.tile_ids, n, 1)


@gluon.jit
def compute(W: gl.constexpr, dK, dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Run warpgroup W's part of the products."""
    if not tile.SPLIT_DKDV:
        key_half(W, dK, dV, gqa_sums, shared, call, tile)
    elif W == 0:
        dv_group(dV, gqa_sums, shared, call, tile)
    else:
        dk_group(dK, gqa_sums, shared, call, tile)


@gluon.jit
def counts_of(shape):
    """Return a launch's shape. It hands counts over as 2 n + 1 (see `odd` in host/arguments.py). With >> in place of
    //, ptxas spills where registers are short."""
    return Shape(
        shape.unit, shape.factor, shape.M // 2, shape.N // 2, shape.d // 2, shape.d_v // 2, shape.H // 2,
        shape.blocks // 2, shape.heads // 2, shape.section // 2, shape.tiles // 2, shape.key_tiles // 2,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["packed", "shape", "variant"])
def attention_backward(
    Q, K, V, dO, L, D, dQ, dK, dV, strides, scratch, counter, packed, variant, shape, tile: gl.constexpr
):  # fmt: skip
    """Compute dK and dV, and add dQ to its sums."""
    shape = counts_of(shape)
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    K_STAGES: gl.constexpr = tile.K_STAGES
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    DO_STAGES: gl.constexpr = tile.DO_STAGES
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    GROUPS_OF_DS: gl.constexpr = 1 if tile.SPLIT_DKDV else 2
    dtype: gl.constexpr = Q.dtype
    dK, dV = Gradient(dK, strides[0]), Gradient(dV, strides[1])  # as arguments, descriptors must stand alone
    s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_C, B_R], dtype)
    kv_full = barriers(1, 1)
    ds_full = barriers(GROUPS_OF_DS, GROUPS_OF_DS)
    if tile.SPLIT_DKDV:
        ds_memory = gl.allocate_shared_memory(dtype, [B_C, B_R], s_layout)
        p_memory = gl.allocate_shared_memory(dtype, [B_C, B_R], s_layout)
        p_full = barriers(1, 1)
    else:  # the groups do not exchange P; the compiler would give an unused barrier's memory to K, not invalidated
        ds_memory = gl.allocate_shared_memory(dtype, [2, B_C, B_R], s_layout)
        p_memory, p_full = ds_memory, ds_full
    k = allocate(K, dtype, K_STAGES, B_C, tile.D)
    v = allocate(V, dtype, 1, B_C, tile.D_V)
    shared = Shared(
        k,
        v,
        Channel(k, kv_full, barriers(1, 2)),
        Channel(
            allocate(Q, dtype, Q_STAGES, B_R, tile.D),
            barriers(Q_STAGES, 1),
            barriers(Q_STAGES, 2),
        ),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout),
        Channel(
            allocate(dO, dtype, DO_STAGES, B_R, tile.D_V),
            barriers(DO_STAGES, 1),
            barriers(DO_STAGES, 2),
        ),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, B_R], D.layout),
        Channel(ds_memory, ds_full, ds_full),
        Channel(gl.allocate_shared_memory(gl.float32, [2, 16, 256], dQ.layout), barriers(2, 1), barriers(2, 1)),
        Channel(p_memory, p_full, p_full),
        tile_channel(4 if DROPOUT_WARPS else 3),
        bits(B_C, 1, 2) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout) if scratch.shift is not None else None,
    )
    fence_async_shared()
    if DROPOUT_WARPS:
        REGISTERS: gl.constexpr = 216 if DROPOUT_WARPS == 4 else 232
        LEFT: gl.constexpr = (488 if DROPOUT_WARPS == 4 else 504) - 2 * REGISTERS
        gl.warp_specialize(
            [
                (compute, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (produce_bits, (shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, DROPOUT_WARPS, 1, 1], [REGISTERS, LEFT, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
