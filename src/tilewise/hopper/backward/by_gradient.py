"""Compute the backward's products beyond head size 128 in three groups of warps, one for each gradient.

One group computes S, P and dV, the next dP, dS and dK, and the last dQ. P goes from the first to the second through
shared memory, and dS from there to the third, in two stages each: the groups wait for each other as little as they can.
S is transposed, as in gradients.py. Rows of 256 columns need more registers than three groups have (split_dkdv.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..parts.channel import arrive, stage, wait, wait_before
from ..parts.dropout_bits import apply_bits, apply_dropout, read_bits
from ..parts.pieces import (
    contract,
    expand,
    pieces_of,
    scaled,
    tile_at,
    tile_in_loop,
    tile_of,
    wait_for,
    zeros_of,
    zeros_of_piece,
)
from ..parts.queue import receive_tile
from ..parts.ragged import zero_keys, zero_queries
from .gqa_reduce import add_partials
from .gradients import gradient, send_dq, tile_probabilities
from .keys import exists, first_step, is_partial, keys_of, next_step, place_of
from .outputs import store_pieces, wait_stores


@gluon.constexpr_function
def groups_of(tile):
    """Count the groups of warps that compute."""
    return 3 if tile.SPLIT_DKDV and tile.D < 256 else 2


@gluon.constexpr_function
def blocks_of_dq(tile):
    """Count the blocks of 64 columns in a query tile's dQ; the last may have fewer."""
    return -(-tile.D // 64)


@gluon.constexpr_function
def piece_at(column, columns):
    """Return which piece of a row a column is in, and where its piece begins."""
    pieces = pieces_of(columns)
    first = [sum(pieces[:n]) for n in range(len(pieces))]
    n = max([n for n in range(len(pieces)) if first[n] <= column])
    return n, first[n]


@gluon.jit
def dq_columns(ds, k, COLUMN: gl.constexpr, tile: gl.constexpr):
    """Start dQ[:, COLUMN : COLUMN + 64] = dS K; fewer columns where rows end before."""
    at: gl.constexpr = piece_at(COLUMN, tile.D)
    WIDTH: gl.constexpr = min(64, tile.D - COLUMN)
    columns = k[at[0]].slice(COLUMN - at[1], WIDTH, 1)
    return warpgroup_mma(ds.permute((1, 0)), columns, zeros_of_piece(64, WIDTH), use_acc=False, is_async=True)


@gluon.jit
def wait_for_both_stages(bars, n):
    """Wait until both stages are empty, after n uses."""
    for s in gl.static_range(2):
        wait_before(bars, n + s)


@gluon.jit
def probabilities_of(k, y, step, keys, shared, call, tile: gl.constexpr):
    """Compute P of use y, and release Q. Return P after dropout, and P as the group that computes dS wants it, both in
    16 bits. # (B_c, B_r)"""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    place = place_of(step, keys, call, B_R)
    partial = is_partial(step, step.loop)
    zero_queries(place, call.packed, shared, y, tile)
    wait(shared.q.full, y)
    S = contract(k, tile_at(shared.q.memory, y), zero)
    logs = stage(shared.logs, y).load(gl.SliceLayout(0, s_layout))
    words = read_bits(shared.bits, y, 0, zero)
    S = warpgroup_mma_wait(0, [S])
    arrive(shared.q.empty, y)
    P = tile_probabilities(S, logs, place, keys.j0, partial, call.variant, shared, call.shape.unit, y)
    # that group multiplies by dP - D: a score's gradient is linear in it, entry by entry
    ones = gl.full([B_C, B_R], 1.0, gl.float32, s_layout)
    p = apply_dropout(P.to(dtype), words, call.variant)
    dS = gradient(P, ones, logs[None, :], 0.0, S, place, keys.j0, call.variant, shared, y)
    return p, dS.to(dtype)


@gluon.jit
def compute_dv(dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute S, P and dV, which leaves through the memory of P."""
    B_C: gl.constexpr = tile.B_C
    k = tile_of(shared.k, 0)
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        dv = zeros_of(B_C, tile.D_V)
        wait(shared.kv.full, n)
        zero_keys(keys, call.packed, shared, n, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            p, dS = probabilities_of(k, y, step, keys, shared, call, tile)
            wait_before(shared.p.empty, y)
            stage(shared.p.memory, y).store(dS)
            arrive(shared.p.full, y)
            wait(shared.do.full, y)
            dv = wait_for(0, expand(p, tile_at(shared.do.memory, y), dv))
            arrive(shared.do.empty, y)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        if call.variant.dropout is not None:
            dv = scaled(dv, call.variant.dropout.rescale)
        parts, last = add_partials(0, dv, keys, gqa_sums, call, tile)
        if last:
            wait_for_both_stages(shared.p.empty, y)
            store_pieces(dV, parts, keys, call.packed, keys.j0, call.shape.d_v, shared.p.memory, tile.D_V)
            wait_stores()
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)


@gluon.jit
def compute_dk(dK, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute dP, dS and dK, which leaves through the memory of dS. P, dO and delta are released once dS is stored:
    before, loads of delta may be under way, and nothing orders them before TMA writes the next."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    v = tile_of(shared.v, 0)
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        dk = zeros_of(B_C, tile.D)
        wait(shared.kv.full, n)
        zero_keys(keys, call.packed, shared, n, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            place = place_of(step, keys, call, B_R)
            zero_queries(place, call.packed, shared, y, tile)
            wait(shared.do.full, y)
            dP = contract(v, tile_at(shared.do.memory, y), zero)
            delta = stage(shared.delta, y).load(gl.SliceLayout(0, s_layout))
            words = read_bits(shared.bits, y, 0, zero)
            dP = warpgroup_mma_wait(0, [dP])
            if call.variant.dropout is not None:
                dP = apply_bits(dP, words) * call.variant.dropout.rescale
            dP = dP - delta[None, :]
            wait(shared.p.full, y)
            P = stage(shared.p.memory, y).load(s_layout)
            ds = (P.to(gl.float32) * dP).to(dtype)
            wait_before(shared.ds.empty, y)
            stage(shared.ds.memory, y).store(ds)
            fence_async_shared()
            arrive(shared.ds.full, y)
            arrive(shared.p.empty, y)
            arrive(shared.do.empty, y)
            wait(shared.q.full, y)
            dk = wait_for(0, expand(ds, tile_at(shared.q.memory, y), dk))
            arrive(shared.q.empty, y)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        parts, last = add_partials(1, dk, keys, gqa_sums, call, tile)
        if last:
            dk = scaled(parts, call.shape.factor)
            wait_for_both_stages(shared.ds.empty, y)
            store_pieces(dK, dk, keys, call.packed, keys.j0, call.shape.d, shared.ds.memory, tile.D)
            wait_stores()
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)


@gluon.jit
def compute_dq(shared, call, tile: gl.constexpr):
    """Compute dQ in blocks of 64 columns. Each is sent while the next is computed."""
    BLOCKS: gl.constexpr = blocks_of_dq(tile)
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        wait(shared.kv.full, n)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            k = tile_in_loop(shared.k, 0, y)
            wait(shared.ds.full, y)
            dq = dq_columns(stage(shared.ds.memory, y), k, 0, tile)
            for b in gl.static_range(1, BLOCKS):
                following = dq_columns(stage(shared.ds.memory, y), k, 64 * b, tile)
                send_dq(warpgroup_mma_wait(1, [dq]), shared, (BLOCKS * y + b - 1) // 2, (BLOCKS * y + b - 1) % 2)
                dq = following
            dq = warpgroup_mma_wait(0, [dq])
            arrive(shared.ds.empty, y)
            send_dq(dq, shared, (BLOCKS * y + BLOCKS - 1) // 2, (BLOCKS * y + BLOCKS - 1) % 2)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)
