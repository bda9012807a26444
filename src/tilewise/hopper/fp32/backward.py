"""Compute dK, dV and sums of dQ for fp32 on Hopper: products of 16-bit pieces (see split.py), as accurate as fp32.

    load                one warp    loads every operand in pieces, otherwise as in backward/kernel.py
    add_dq              one warp    adds pieces of dQ, as there
    half_of_tile        two groups  64 keys with their S, P, dP and dS, and 64 columns of their dK, dV and dQ, each:
        head sizes to 64                half of 128 keys
        head size 128                   the same 64 keys, and half of the columns: S and dP are computed twice
        head size 128 in 3 pieces       the same, and both write the same dS to the same memory, so they go in step

A product of two sums of pieces leaves out what is below fp32's last bit, and adds the smallest products first. Tensor
cores cut bits off as they add. So each sum over one tile begins at zero and joins dK or dV by a multiply-add, which
also undoes the scales. P and dS are split in registers. Groups that share nothing but Q and dO drift apart, and one's
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
from ..backward.deterministic import hand_turn_on, wait_turn
from ..backward.gqa_reduce import with_shares
from ..backward.gradients import hand_over
from ..backward.kernel import leave_dq
from ..backward.keys import block_of, first_visit, is_edge, keys_of, next_visit, place_of, query_block, there
from ..parts import triton_compat
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    let_next_begin,
    stage,
    take_turns,
    wait,
    wait_added,
    wait_before,
    wait_kernels,
)
from ..parts.queue import draw_in_turn, hand_on, leave, ticket, tickets
from .backward_products import as_operand, cut, pieces, power_above, product, store_ds, undo_of


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
    EDGES: bool
    """Says whether any tile may need the mask."""
    TURN: int
    GROUP: int
    SHARES: int
    IN_STEP: bool
    """Says whether the groups share the memory of dS; then pieces of dQ leave through dO's."""


class Shape(NamedTuple):
    """Hold lengths and counts of a launch; for packed sequences, M and N count all rows."""

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
    sums: object
    ds: object
    dq: object
    """Lies in the memory of ds: a group's dS is read before its piece of dQ comes, and that is read before the next
    dS."""
    drawn: object


@gluon.jit
def stage_of(y, STAGES: gl.constexpr):
    """Return the stage of use y; of one stage its number, which is 0, as `channel.held` has it."""
    return y >> 31 if STAGES == 1 else y % STAGES


@gluon.jit
def load_pieces(X, row, bar, memory, use, PIECES: gl.constexpr):
    """Load all pieces of a block of rows."""
    for i in gl.static_range(PIECES):
        triton_compat.load(X, [i, row, 0], bar, memory.index(use * PIECES + i))


@gluon.jit
def load(Q, K, V, dO, L, D, shared, counter, shape, packed, variant, tile: gl.constexpr):
    """Run the producer warp."""
    B_R: gl.constexpr = tile.B_R
    PIECES: gl.constexpr = tile.PIECES
    BLOCKS: gl.constexpr = tile.B_C // 64
    n = 0  # tiles of keys so far
    y = 0  # tiles of queries so far
    t = draw_in_turn(counter)
    wait_kernels()
    while t < shape.tiles * shape.heads:
        keys = keys_of(t, shape, packed, tile)
        if keys.j0 < keys.N:  # packed sequences may be shorter
            hand_on(shared.drawn, t, n)
            first = block_of(keys, shape, packed, tile) * tile.B_C
            wait_before(shared.kv.empty, n)
            bar = expect(shared.kv.full, n, 2 * BLOCKS * PIECES * K.block_type.nbytes)
            for c in gl.static_range(BLOCKS):
                load_pieces(K, first + 64 * c, bar, shared.k, c, PIECES)
                load_pieces(V, first + 64 * c, bar, shared.v, c, PIECES)
            n += 1
            visit = first_visit(keys, variant, tile)
            while there(visit):
                row = query_block(visit, keys, shape, packed, variant, tile) * B_R
                wait_before(shared.q.empty, y)
                bar = expect(shared.q.full, y, PIECES * Q.block_type.nbytes + 4 * B_R)
                load_pieces(Q, row, bar, shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES)
                triton_compat.load(L, [row], bar, stage(shared.logs, y))
                wait_before(shared.do.empty, y)
                bar = expect(shared.do.full, y, PIECES * dO.block_type.nbytes + 4 * B_R)
                load_pieces(dO, row, bar, shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES)
                triton_compat.load(D, [row], bar, stage(shared.sums, y))
                y += 1
                visit = next_visit(visit, keys, variant, tile)
        t = draw_in_turn(counter)
    hand_on(shared.drawn, t, n)
    leave(counter)


@gluon.jit
def add_dq(dQ, done, turns, shared, shape, packed, variant, tile: gl.constexpr):
    """Run the writer warp, as in backward/kernel.py. Here a group gets its memory back before the warp waits for the
    other's piece."""
    IN_ALL: gl.constexpr = tile.D // 64  # pieces in a query tile; both groups add to it if it is one
    y = 0
    n = 0
    wait_kernels()
    let_next_begin()
    t = ticket(shared.drawn, n, 1)
    while t < shape.tiles * shape.heads:
        keys = keys_of(t, shape, packed, tile)
        visit = first_visit(keys, variant, tile)
        while there(visit):
            block = query_block(visit, keys, shape, packed, variant, tile)
            if tile.TURN:
                wait_turn(turns, block, visit, keys, tile)
            for w in gl.static_range(2):
                mbarrier.wait(shared.dq.full.index(w), y & 1)
                triton_compat.reduce_add(dQ, [(block * IN_ALL + w % IN_ALL) * 16, 0], shared.dq.memory.index(w))
                if tile.TURN and IN_ALL == 1:
                    wait_added()
                tma.store_wait(0)
                mbarrier.arrive(shared.dq.empty.index(w))
                if tile.IN_STEP:
                    arrive(shared.do.empty, y)
            if tile.TURN:
                hand_turn_on(turns, block, visit, keys, variant, tile)
            y += 1
            visit = next_visit(visit, keys, variant, tile)
        leave_dq(done, keys, shape, tile)
        n += 1
        t = ticket(shared.drawn, n, 1)


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
def shown(P, visit, keys, j0, shape, variant, tile: gl.constexpr):
    """Return P of the keys from j0 on, 0 where the mask hides it."""
    if tile.EDGES:
        if is_edge(visit, visit.walk):
            i = gl.arange(0, tile.B_R, gl.SliceLayout(0, P.type.layout))[None, :]
            j = gl.arange(0, 64, gl.SliceLayout(1, P.type.layout))[:, None]
            P = gl.where(seen(place_of(visit, keys, shape, variant, tile.B_R), variant, i, j0, j), P, 0.0)
    return P


@gluon.jit
def half_of_tile(
    W: gl.constexpr, dK, dV, shares, scales, shared, shape, packed, variant, unit, factor, tile: gl.constexpr
):
    """Compute, in warpgroup W, rows 64 W to 64 W + 63 of every key tile, or columns 64 W to 64 W + 63."""
    PIECES: gl.constexpr = tile.PIECES
    PRODUCTS: gl.constexpr = PIECES * (PIECES + 1) // 2
    HALF: gl.constexpr = W if tile.B_C == 128 else 0  # which 64 keys
    COLUMN: gl.constexpr = 0 if tile.B_C == 128 else 64 * W
    # fp16's small numbers lose bits: P is kept times 2^15, and dS times 2^15 over its bound
    SHIFT: gl.constexpr = 15 if PIECES == 2 else 0
    UNDO: gl.constexpr = 2.0**-SHIFT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([64, 64], gl.float32, layout)
    y = 0
    n = 0
    wait_kernels()  # for scales
    t = ticket(shared.drawn, n, 4)
    while t < shape.tiles * shape.heads:
        keys = keys_of(t, shape, packed, tile)
        j0 = keys.j0 + 64 * HALF
        block = block_of(keys, shape, packed, tile)
        k_undo, v_undo = undo_of(scales.k, block, PIECES), undo_of(scales.v, block, PIECES)
        v_norm = gl.load(scales.v_norm + block)
        dk, dv = zero, zero
        wait(shared.kv.full, n)
        visit = first_visit(keys, variant, tile)
        while there(visit):
            block = query_block(visit, keys, shape, packed, variant, tile)
            q_undo, do_undo = undo_of(scales.q, block, PIECES), undo_of(scales.do, block, PIECES)
            down, up = power_above(v_norm * gl.load(scales.do_norm + block) + gl.load(scales.D + block))
            own = HALF + (y >> 31)  # the same number: see channel.held
            wait(shared.q.full, y)
            q = pieces(shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES, None, True)
            S = product(pieces(shared.k, own, PIECES), q, zero)
            wait(shared.do.full, y)
            do = pieces(shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES, None, True)
            dP = product(pieces(shared.v, own, PIECES), do, zero)
            logs = stage(shared.logs, y).load(row_layout)
            S = warpgroup_mma_wait(PRODUCTS, [S])
            P = gl.exp2((S * (k_undo * q_undo * unit) - logs[None, :]) * LOG2E + SHIFT)
            P = shown(P, visit, keys, j0, shape, variant, tile)
            p = as_operand(cut(P, PIECES))
            sums = stage(shared.sums, y).load(row_layout) * down
            dP = warpgroup_mma_wait(0, [dP])
            do = pieces(shared.do.memory, stage_of(y, tile.DO_STAGES), PIECES, COLUMN)
            dv_tile = product(p, do, zero)
            dS = P * (dP * (do_undo * v_undo * down) - sums[None, :])
            ds = cut(dS, PIECES)
            if not tile.IN_STEP:
                mbarrier.wait(shared.dq.empty.index(W), (y & 1) ^ 1)
            ds_transposed = store_ds(ds, shared.ds, y >> 31, W, tile.IN_STEP)
            fence_async_shared()
            triton_compat.barrier()
            dv_tile = warpgroup_mma_wait(0, [dv_tile])
            if not tile.IN_STEP:
                arrive(shared.do.empty, y)
            dv += dv_tile * (do_undo * UNDO)
            q = pieces(shared.q.memory, stage_of(y, tile.Q_STAGES), PIECES, COLUMN)
            dk_tile = product(as_operand(ds), q, zero)
            dq = product(ds_transposed, pieces(shared.k, own, PIECES, COLUMN), zero)
            dk_tile = warpgroup_mma_wait(PRODUCTS, [dk_tile])
            arrive(shared.q.empty, y)
            dk += dk_tile * (q_undo * up * UNDO)
            dq = warpgroup_mma_wait(0, [dq])
            if tile.IN_STEP:
                take_turns("sync", 0)  # both groups: dS and dO are read
            else:
                triton_compat.barrier()  # dS is read
            hand_over(dq * (k_undo * up * UNDO), shared, y, W)
            y += 1
            visit = next_visit(visit, keys, variant, tile)
        arrive(shared.kv.empty, 0)
        parts, last = with_shares(W, (dk, dv), keys, shares, shape, packed, tile)
        if last:
            dk, dv = parts
            store_gradient(dK, dk * factor, keys, j0, shape.d, COLUMN)
            store_gradient(dV, dv, keys, j0, shape.d_v, COLUMN)
        n += 1
        t = ticket(shared.drawn, n, 4)


@gluon.jit(do_not_specialize=["packed", "shape", "variant"])
def fp32_backward(
    Q, K, V, dO, L, D, scales, dQ, done, dK, dV, shares, counter, turns, packed, variant, unit, factor,
    shape, tile: gl.constexpr, num_warps: gl.constexpr = 4,
):  # fmt: skip
    """Compute dK and dV, and add dQ to its sums, from pieces."""
    PIECES: gl.constexpr = tile.PIECES
    SIZE: gl.constexpr = tile.D
    KEYS: gl.constexpr = tile.B_C // 64 * PIECES
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    DO_STAGES: gl.constexpr = tile.DO_STAGES
    dtype: gl.constexpr = Q.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    ds = gl.allocate_shared_memory(dtype, [PIECES if tile.IN_STEP else 2 * PIECES, 64, 64], ds_layout)
    do = gl.allocate_shared_memory(dtype, [DO_STAGES * PIECES, 1, 64, SIZE], dO.layout)
    dq = do if tile.IN_STEP else ds
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
        tickets(3),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (half_of_tile, (0, dK, dV, shares, scales, shared, shape, packed, variant, unit, factor, tile)),
            (half_of_tile, (1, dK, dV, shares, scales, shared, shape, packed, variant, unit, factor, tile)),
            (load, (Q, K, V, dO, L, D, shared, counter, shape, packed, variant, tile)),
            (add_dq, (dQ, done, turns, shared, shape, packed, variant, tile)),
        ],
        [4, 1, 1], [240, 24, 24],
    )  # fmt: skip
