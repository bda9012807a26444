"""Keep dS of key tiles in memory, and compute dQ = dS K of query tiles from it: the backward by gradient."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from ..parts import triton_compat
from ..parts.channel import (
    arrive,
    expect,
    fence_async_global,
    stage,
    wait,
    wait_before,
    wait_equal,
    wait_reductions,
)
from ..parts.pieces import bytes_of, load_pieces, scaled, tile_at, wait_for, zeros_of
from ..parts.ragged import zero_all_from
from .gqa_reduce import add_all_stored, store_partials
from .items import (
    all_queries,
    ds_at,
    first_key,
    item_at,
    items,
    keys_at,
    keys_done,
    queries_at,
    queries_done,
    receive,
    tag_of,
    tags,
)
from .keys import Keys, exists, first_step, next_step, tile_of
from .outputs import store_pieces, wait_stores


@gluon.jit
def store_ds(dS, work, shared, call, tile: gl.constexpr):
    """Run the writer warp: store dS of each key tile, and tag it. Its memory is free once all query tiles of the chunk
    that had it before are done."""
    y = 0
    n = 0
    message = receive(shared.messages, n, 1)
    while message.t < items(call.shape, tile):
        item = item_at(message.t, call.shape, tile)
        if item.of_keys:
            if item.chunk >= call.shape.resident:
                before = queries_done(work, item.chunk - call.shape.resident, call.shape, tile)
                wait_equal(before, all_queries(call.shape, tile))
                fence_async_global()
            keys = keys_at(item, message.b, call, tile)
            step = first_step(keys, call.variant, tile)
            first = y
            while exists(step):
                m = tile_of(step, keys, call.variant)
                at = ds_at(item.chunk, step.h - keys.h, m, item.n, call.shape, tile)
                wait(shared.ds.full, y)
                triton_compat.store(dS, [at * tile.B_C, 0], stage(shared.ds.memory, y))
                gl.store(tags(work, call.shape) + at, tag_of(item.chunk, m, item.n, call.shape, tile))
                if y > first:
                    tma.store_wait(1)
                    arrive(shared.ds.empty, y - 1)
                y += 1
                step = next_step(step, keys, call.variant, tile)
            wait_reductions()
            if y > first:
                arrive(shared.ds.empty, y - 1)
            fence_async_global()
            triton_compat.barrier()
            gl.atomic_add(keys_done(work, item.chunk, call.shape, tile), 1, sem="release")
        n += 1
        message = receive(shared.messages, n, 1)


@gluon.jit
def is_there(queries, half, n, work, call, tile: gl.constexpr):
    """Return where dS of half of the query tile and of the chunk's key tile n is, and whether it is there."""
    shape = call.shape
    m = queries.i0 // tile.B_R + half
    at = ds_at(queries.chunk, queries.g, m, n, shape, tile)
    inside = (n < shape.tiles) & (m * tile.B_R < queries.M)
    tag = gl.load(tags(work, shape) + at, mask=inside, other=0)
    return at, tag == tag_of(queries.chunk, m, n, shape, tile)


@gluon.jit
def range_of_ds(queries, work, call, tile: gl.constexpr):
    """Return the range of the chunk's key tiles that have dS for a query tile, once they all are done."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tiles = call.shape.tiles
    wait_equal(keys_done(work, queries.chunk, call.shape, tile), tiles)
    fence_async_global()
    lo, hi = tiles, 0
    for first in range(gl.maximum(queries.first, 0), gl.minimum(queries.end, tiles), 128):
        n = first + gl.arange(0, 128, layout)
        for half in gl.static_range(2):
            _, there = is_there(queries, half, n, work, call, tile)
            lo = gl.minimum(lo, gl.min(gl.where(there & (n < queries.end), n, tiles), 0))
            hi = gl.maximum(hi, gl.max(gl.where(there & (n < queries.end), n + 1, 0), 0))
    return lo, hi


@gluon.jit
def row_of_ds(queries, half, n, work, call, tile: gl.constexpr):
    """Return from which row TMA loads a tile of dS: past the last, where there are zeros, if there is none."""
    at, there = is_there(queries, half, n, work, call, tile)
    return gl.where(there, at * tile.B_C, 1 << 30)


@gluon.jit
def half_of_ds(shared, y, half):
    """Return the memory of a tile of dS of use y, half of the query tile: it is that of dO. # (B_c, B_r)"""
    do = shared.do.memory[0]
    COUNT: gl.constexpr = do.shape[4] // 64
    STAGES: gl.constexpr = do.shape[0]
    tiles = triton_compat.reinterpret(do, do.dtype, [STAGES * COUNT, 64, 64], shared.ds.memory.layout)
    return tiles.index(y % STAGES * COUNT + half)


@gluon.jit
def load_ds(K, dS, queries, lo, hi, y, work, shared, call, tile: gl.constexpr):
    """Load K and dS for a query tile, from use y on, into the memory of Q and dO. Return the next use. Tags are loaded
    one key tile ahead."""
    b = queries.b if call.packed is None else 0
    left, right = row_of_ds(queries, 0, lo, work, call, tile), row_of_ds(queries, 1, lo, work, call, tile)
    for n in range(lo, hi):
        wait_before(shared.q.empty, y)
        bar = expect(shared.q.full, y, bytes_of(K.block_type, tile.D))
        row = queries.k0 + first_key(n, queries, call, tile)
        load_pieces(K, b, queries.h_k, row, bar, shared.q.memory, y % tile.Q_STAGES)
        wait_before(shared.do.empty, y)
        bar = expect(shared.do.full, y, 2 * dS.block_type.nbytes)
        triton_compat.load(dS, [left, 0], bar, half_of_ds(shared, y, 0))
        triton_compat.load(dS, [right, 0], bar, half_of_ds(shared, y, 1))
        left, right = row_of_ds(queries, 0, n + 1, work, call, tile), row_of_ds(queries, 1, n + 1, work, call, tile)
        y += 1
    return y


@gluon.jit
def add_product(W: gl.constexpr, dq, n, y, queries, shared, call, tile: gl.constexpr):
    """Start dQ += dS K of group W's queries and of the chunk's key tile n, use y."""
    k = tile_at(shared.q.memory, y)
    wait(shared.q.full, y)
    wait(shared.do.full, y)
    if call.packed is not None:
        left = queries.N - first_key(n, queries, call, tile)
        if left < tile.B_C:
            zero_all_from(k, left)
    ds = half_of_ds(shared, y, W).permute((1, 0))
    found = ()
    for p in gl.static_range(len(dq)):
        found += (warpgroup_mma(ds, k[p], dq[p], is_async=True),)
    return found


@gluon.jit
def release(dq, LATER: gl.constexpr, y, shared):
    """Wait until all products of dQ are complete but the LATER ones, and release use y."""
    dq = wait_for(LATER, dq)
    arrive(shared.q.empty, y)
    arrive(shared.do.empty, y)
    return dq


@gluon.jit
def compute_dq(W: gl.constexpr, dQ, item, message, y, buffer, work, shared, call, tile: gl.constexpr):
    """Compute group W's rows of dQ, which leave through `buffer`, from use y on. Return the next use."""
    shape = call.shape
    queries = queries_at(item, message.b, call, tile)
    dq = zeros_of(64, tile.D)
    lo, hi = message.lo, message.hi
    if lo < hi:
        LATE: gl.constexpr = min(tile.Q_STAGES, tile.DO_STAGES) > 1  # a single stage is free before the next product
        dq = add_product(W, dq, lo, y, queries, shared, call, tile)
        y += 1
        for n in range(lo + 1, hi):
            if not LATE:
                dq = release(dq, 0, y - 1, shared)
            dq = add_product(W, dq, n, y, queries, shared, call, tile)
            if LATE:
                dq = release(dq, len(dq), y - 1, shared)
            y += 1
        dq = release(dq, 0, y - 1, shared)
    last = queries.end <= shape.tiles
    if work.sums is not None:  # one chunk after the other
        at = work.sums + ((queries.g * shape.query_tiles + queries.x) * 2 + W).to(gl.int64) * (64 * tile.D)
        if queries.chunk > 0:
            wait_equal(queries_done(work, queries.chunk - 1, shape, tile), all_queries(shape, tile))
        if queries.first < 0:
            dq = add_all_stored(dq, at)
        if ~last:
            store_partials(dq, at)
            triton_compat.barrier()
    row = queries.i0 + 64 * W
    if last & (row < queries.M):
        rows = Keys(queries.b, queries.h, queries.h, 0, 0, queries.q0, queries.q0, queries.M, queries.M, 1)
        store_pieces(dQ, scaled(dq, shape.factor), rows, call.packed, row, shape.d, buffer, tile.D)
        wait_stores()
    gl.atomic_add(queries_done(work, queries.chunk, shape, tile), 1, sem="release")
    return y
