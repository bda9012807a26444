"""Compute dK, dV and sums of dQ for fp32 on Hopper: products of 16-bit pieces (see split.py), as accurate as fp32.

    load                one warp    loads every operand in pieces, otherwise as in backward/kernel.py
    add_dq              one warp    adds pieces of dQ, as there
    half_of_tile        two groups  64 keys with their S, P, dP and dS, and 64 columns of their dK, dV and dQ, each:
        head sizes to 64                half of 128 keys
        head size 128                   the same 64 keys, and half of the columns: S and dP are computed twice
        head size 128 in 3 pieces       the same, and both write the same dS to the same memory, so they synchronise

A product of two sums of pieces leaves out what is below fp32's last bit, and adds the smallest products first. Tensor
cores cut bits off as they add. So each sum over one tile begins at zero and joins dK or dV by a multiply-add, which
also descales. P and dS are split in registers. Groups that share nothing but Q and dO drift apart, and one's
products run under the other's exponentials.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ...tile.gradients import seen
from ...tile.rows import origin
from ...tile.softmax import LOG2E
from ..backward.add_dq import count_done
from ..backward.deterministic import release_dq_semaphore, wait_dq_semaphore
from ..backward.gqa_reduce import add_partials
from ..backward.gradients import send_dq
from ..backward.keys import block_of, exists, first_step, is_partial, keys_of, next_step, place_of, query_block
from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    launch_dependents,
    named_barrier,
    stage,
    wait,
    wait_before,
    wait_dependencies,
    wait_reductions,
)
from ..parts.queue import fetch_tile, receive_tile, reset_counter, send_tile, tile_channel
from .backward_products import as_operand, descale_of, pieces, power_above, product, split_registers, store_ds


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants. backward/kernel.py's functions read fields of the same
    names."""

    B_R: int
    """Is 64, the queries that have a common scale."""
    B_C: int
    """Counts the keys that have a common scale."""
    D: int
    """Counts the columns of a row in shared memory: the head size, rounded up to 64 or 128."""
    PIECES: int
    """Counts the pieces of every number: 2 in fp16, or 3 in bf16."""
    Q_STAGES: int
    DO_STAGES: int
    MASK_IN_LOOP: bool
    """Says whether any tile may need the mask."""
    SEMAPHORE_TILES: int
    GROUP: int
    GQA_PROGRAMS: int
    SYNC_GROUPS: bool
    """Says whether the groups share the memory of dS; then pieces of dQ leave through dO's."""


class Shape(NamedTuple):
    """Hold factors, lengths and counts of a launch; for packed sequences, M and N count all rows."""

    unit: object
    """Scales logits."""
    factor: object
    """Is the scale of the logits, which dQ and dK take."""
    M: object
    N: object
    d: object
    d_v: object
    H: object
    blocks: object
    """Counts the query tiles of a head in scratch."""
    key_tiles: object
    """Counts the key tiles of a head in scratch."""
    heads: object
    section: object
    tiles: object


class Shared(NamedTuple):
    """Hold everything in shared memory. A stage of k, v, q and do is a row of pieces."""

    k: object
    v: object
    kv: object
    """Holds `full` and `empty` of both K and V."""
    q: object
    logs: object
    do: object
    delta: object
    ds: object
    dq: object
    """Lies in the memory of ds: a group's dS is read before its piece of dQ comes, and that is read before the next
    dS."""
    tile_ids: object


@gluon.jit
def stage_of(y, STAGES: gl.constexpr):
    """Return the stage of use y; of one stage its number, which is 0, as in `channel.stage_in_loop`."""
    return y >> 31 if STAGES == 1 else y % STAGES


@gluon.jit
def load_pieces(X, row, bar, memory, use, PIECES: gl.constexpr):
    """Load all pieces of a block of rows."""
    for i in gl.static_range(PIECES):
        triton_compat.load(X, [i, row, 0], bar, memory.index(use * PIECES + i))


@gluon.jit
def load(Q, K, V, dO, L, D, shared, counter, call, tile: gl.constexpr):
    """Run the producer warp."""
    B_R: gl.constexpr = tile.B_R
    PIECES: gl.constexpr = tile.PIECES
    BLOCKS: gl.constexpr = tile.B_C // 64
    n = 0  # tiles of keys so far
    y = 0  # tiles of queries so far
    t = fetch_tile(counter)
    wait_dependencies()
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        if keys.j0 < keys.N:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            first = block_of(keys, call, tile) * tile.B_C
            wait_before(shared.kv.empty, n)
            bar = expect(shared.kv.full, n, 2 * BLOCKS * PIECES * K.block_type.nbytes)
            for c in gl.static_range(BLOCKS):
                load_pieces(K, first + 64 * c, bar, shared.k, c, PIECES)
                load_pieces(V, first + 64 * c, bar, shared.v, c, PIECES)
            n += 1
            step = first_step(keys, call.variant, tile)
            while exists(step):
                row = query_block(step, keys, call, tile) * B_R
                wait_before(shared.q.empty, y)
                bar = expect(shared.q.full, y, PIECES * Q.block_type.nbytes + 4 * B_R)
                load_pieces(Q, row, bar, shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES)
                triton_compat.load(L, [row], bar, stage(shared.logs, y))
                wait_before(shared.do.empty, y)
                bar = expect(shared.do.full, y, PIECES * dO.block_type.nbytes + 4 * B_R)
                load_pieces(dO, row, bar, shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES)
                triton_compat.load(D, [row], bar, stage(shared.delta, y))
                y += 1
                step = next_step(step, keys, call.variant, tile)
        t = fetch_tile(counter)
    send_tile(shared.tile_ids, t, n)
    reset_counter(counter)


@gluon.jit
def add_dq(dQ, scratch, shared, call, tile: gl.constexpr):
    """Run the writer warp, as in backward/kernel.py. Here a group gets its memory back before the warp waits for the
    other's piece."""
    IN_ALL: gl.constexpr = tile.D // 64  # pieces in a query tile; both groups add to it if it is one
    y = 0
    n = 0
    wait_dependencies()
    launch_dependents()
    t = receive_tile(shared.tile_ids, n, 1)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            block = query_block(step, keys, call, tile)
            if tile.SEMAPHORE_TILES:
                wait_dq_semaphore(scratch.dq_semaphore, block, step, keys, tile)
            for w in gl.static_range(2):
                mbarrier.wait(shared.dq.full.index(w), y & 1)
                triton_compat.reduce_add(dQ, [(block * IN_ALL + w % IN_ALL) * 16, 0], shared.dq.memory.index(w))
                if tile.SEMAPHORE_TILES and IN_ALL == 1:
                    wait_reductions()
                tma.store_wait(0)
                mbarrier.arrive(shared.dq.empty.index(w))
                if tile.SYNC_GROUPS:
                    arrive(shared.do.empty, y)
            if tile.SEMAPHORE_TILES:
                release_dq_semaphore(scratch.dq_semaphore, block, step, keys, call.variant, tile)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        count_done(scratch.done, keys, call.shape, tile)
        n += 1
        t = receive_tile(shared.tile_ids, n, 1)


@gluon.jit
def store_gradient(G, x, keys, row, d, COLUMN: gl.constexpr):
    """Store rows of dK or dV, from `row` of the sequence and column COLUMN on. Offsets hold the row, or ptxas would
    keep them from tile to tile."""
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    columns = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    at = origin(G, keys.b, keys.h_k, keys.k0) + rows.to(gl.int64) * G.row + columns
    gl.store(at, x, mask=(rows < keys.N) & (columns < d))


@gluon.jit
def shown(P, step, keys, j0, call, tile: gl.constexpr):
    """Return P of the keys from j0 on, 0 where the mask hides it."""
    if tile.MASK_IN_LOOP:
        if is_partial(step, step.loop):
            i = gl.arange(0, tile.B_R, gl.SliceLayout(0, P.type.layout))[None, :]
            j = gl.arange(0, 64, gl.SliceLayout(1, P.type.layout))[:, None]
            P = gl.where(seen(place_of(step, keys, call, tile.B_R), call.variant, i, j0, j), P, 0.0)
    return P


@gluon.jit
def half_of_tile(W: gl.constexpr, dK, dV, gqa_sums, scales, shared, call, tile: gl.constexpr):
    """Compute, in warpgroup W, rows 64 W to 64 W + 63 of every key tile, or columns 64 W to 64 W + 63."""
    PIECES: gl.constexpr = tile.PIECES
    PRODUCTS: gl.constexpr = PIECES * (PIECES + 1) // 2
    HALF: gl.constexpr = W if tile.B_C == 128 else 0  # which 64 keys
    COLUMN: gl.constexpr = 0 if tile.B_C == 128 else 64 * W
    # fp16's small numbers lose bits: P is kept times 2^15, and dS times 2^15 over its bound
    SHIFT: gl.constexpr = 15 if PIECES == 2 else 0
    DESCALE: gl.constexpr = 2.0**-SHIFT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([64, 64], gl.float32, layout)
    y = 0
    n = 0
    wait_dependencies()  # for scales
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        j0 = keys.j0 + 64 * HALF
        block = block_of(keys, call, tile)
        k_descale, v_descale = descale_of(scales.k, block, PIECES), descale_of(scales.v, block, PIECES)
        v_norm = gl.load(scales.v_norm + block)
        dk, dv = zero, zero
        wait(shared.kv.full, n)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            block = query_block(step, keys, call, tile)
            q_descale, do_descale = descale_of(scales.q, block, PIECES), descale_of(scales.do, block, PIECES)
            down, up = power_above(v_norm * gl.load(scales.do_norm + block) + gl.load(scales.D + block))
            own = HALF + (y >> 31)  # the same number: see channel.stage_in_loop
            wait(shared.q.full, y)
            q = pieces(shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES, None, True)
            S = product(pieces(shared.k, own, PIECES), q, zero)
            wait(shared.do.full, y)
            do = pieces(shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES, None, True)
            dP = product(pieces(shared.v, own, PIECES), do, zero)
            logs = stage(shared.logs, y).load(row_layout)
            S = warpgroup_mma_wait(PRODUCTS, [S])
            P = gl.exp2((S * (k_descale * q_descale * call.shape.unit) - logs[None, :]) * LOG2E + SHIFT)
            P = shown(P, step, keys, j0, call, tile)
            p = as_operand(split_registers(P, PIECES))
            delta = stage(shared.delta, y).load(row_layout) * down
            dP = warpgroup_mma_wait(0, [dP])
            do = pieces(shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES, COLUMN)
            dv_tile = product(p, do, zero)
            dS = P * (dP * (do_descale * v_descale * down) - delta[None, :])
            ds = split_registers(dS, PIECES)
            if not tile.SYNC_GROUPS:
                mbarrier.wait(shared.dq.empty.index(W), (y & 1) ^ 1)
            ds_transposed = store_ds(ds, shared.ds, y >> 31, W, tile.SYNC_GROUPS)
            fence_async_shared()
            triton_compat.barrier()
            dv_tile = warpgroup_mma_wait(0, [dv_tile])
            if not tile.SYNC_GROUPS:
                arrive(shared.do.empty, y)
            dv += dv_tile * (do_descale * DESCALE)
            q = pieces(shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES, COLUMN)
            dk_tile = product(as_operand(ds), q, zero)
            dq = product(ds_transposed, pieces(shared.k, own, PIECES, COLUMN), zero)
            dk_tile = warpgroup_mma_wait(PRODUCTS, [dk_tile])
            arrive(shared.q.empty, y)
            dk += dk_tile * (q_descale * up * DESCALE)
            dq = warpgroup_mma_wait(0, [dq])
            if tile.SYNC_GROUPS:
                named_barrier("sync", 0)  # both groups: dS and dO are read
            else:
                triton_compat.barrier()  # dS is read
            send_dq(dq * (k_descale * up * DESCALE), shared, y, W)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        parts, last = add_partials(W, (dk, dv), keys, gqa_sums, call, tile)
        if last:
            dk, dv = parts
            store_gradient(dK, dk * call.shape.factor, keys, j0, call.shape.d, COLUMN)
            store_gradient(dV, dv, keys, j0, call.shape.d_v, COLUMN)
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)


@gluon.jit(do_not_specialize=["packed", "shape", "variant"])
def attention_backward_fp32(
    Q, K, V, dO, L, D, scales, dQ, dK, dV, scratch, counter, packed, variant, shape, tile: gl.constexpr
):  # fmt: skip
    """Compute dK and dV, and add dQ to its sums, from pieces."""
    PIECES: gl.constexpr = tile.PIECES
    SIZE: gl.constexpr = tile.D
    KEYS: gl.constexpr = tile.B_C // 64 * PIECES
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    DO_STAGES: gl.constexpr = tile.DO_STAGES
    dtype: gl.constexpr = Q.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    ds = gl.allocate_shared_memory(dtype, [PIECES if tile.SYNC_GROUPS else 2 * PIECES, 64, 64], ds_layout)
    do = gl.allocate_shared_memory(dtype, [DO_STAGES * PIECES, 1, 64, SIZE], dO.layout)
    dq = do if tile.SYNC_GROUPS else ds
    shared = Shared(
        gl.allocate_shared_memory(dtype, [KEYS, 1, 64, SIZE], K.layout),
        gl.allocate_shared_memory(dtype, [KEYS, 1, 64, SIZE], V.layout),
        Channel(ds, barriers(1, 1), barriers(1, 2)),
        Channel(
            gl.allocate_shared_memory(dtype, [Q_STAGES * PIECES, 1, 64, SIZE], Q.layout),
            barriers(Q_STAGES, 1),
            barriers(Q_STAGES, 2),
        ),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, 64], L.layout),
        Channel(
            do,
            barriers(DO_STAGES, 1),
            barriers(DO_STAGES, 2),
        ),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, 64], D.layout),
        ds,
        Channel(
            triton_compat.reinterpret(dq, gl.float32, [PIECES, 16, 256], dQ.layout), barriers(2, 1), barriers(2, 1)
        ),
        tile_channel(3),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (half_of_tile, (0, dK, dV, scratch.gqa_sums, scales, shared, Call(shape, packed, variant), tile)),
            (half_of_tile, (1, dK, dV, scratch.gqa_sums, scales, shared, Call(shape, packed, variant), tile)),
            (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
            (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
