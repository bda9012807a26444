"""Compute the backward's products of 256 columns by a dK/dV split: one group owns dV (S, P), the other dK (dP, dS), and
each half of dQ.

P goes one way through shared memory, dS back. S is transposed, as in gradients.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..parts.channel import arrive, stage, wait
from ..parts.dropout_bits import apply_bits, read_bits
from ..parts.pieces import (
    contract,
    expand,
    scaled,
    tile_at,
    tile_of,
    wait_for,
    wait_for_both,
    zeros_of,
)
from ..parts.queue import receive_tile
from ..parts.ragged import zero_keys, zero_queries
from .by_gradient import dq_columns, probabilities_of
from .gqa_reduce import add_partials
from .gradients import send_dq
from .keys import exists, first_step, keys_of, next_step, place_of
from .outputs import store_pieces, wait_stores


@gluon.jit
def dv_group(dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute S, P, dV, and the left half of dQ."""
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
            shared.p.memory.store(dS)
            arrive(shared.p.full, y)
            wait(shared.do.full, y)
            dv = expand(p, tile_at(shared.do.memory, y), dv)
            wait(shared.ds.full, y)
            dq = dq_columns(shared.ds.memory, k, 0, tile)
            dv, dq = wait_for_both(0, dv, dq)
            dq_second = dq_columns(shared.ds.memory, k, 64, tile)
            arrive(shared.do.empty, y)
            send_dq(dq, shared, 2 * y, 0)
            send_dq(warpgroup_mma_wait(0, [dq_second]), shared, 2 * y + 1, 0)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        mbarrier.wait(shared.dq.empty.index(0), 1)
        if call.variant.dropout is not None:
            dv = scaled(dv, call.variant.dropout.rescale)
        parts, last = add_partials(0, dv, keys, gqa_sums, call, tile)
        if last:
            store_pieces(dV, parts, keys, call.packed, keys.j0, call.shape.d_v, shared.dq.memory.index(0), tile.D_V)
            wait_stores()
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)


@gluon.jit
def dk_group(dK, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute dP, dS, dK, and the right half of dQ."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    k = tile_of(shared.k, 0)
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
            arrive(shared.do.empty, y)
            if call.variant.dropout is not None:
                dP = apply_bits(dP, words) * call.variant.dropout.rescale
            dP = dP - delta[None, :]
            wait(shared.p.full, y)
            ds = (shared.p.memory.load(s_layout).to(gl.float32) * dP).to(dtype)
            shared.ds.memory.store(ds)
            fence_async_shared()
            arrive(shared.ds.full, y)
            wait(shared.q.full, y)
            dq = dq_columns(shared.ds.memory, k, 128, tile)
            dk = expand(ds, tile_at(shared.q.memory, y), dk)
            dq = warpgroup_mma_wait(len(dk), [dq])
            send_dq(dq, shared, 2 * y, 1)
            dk = wait_for(0, dk)
            dq_second = dq_columns(shared.ds.memory, k, 192, tile)
            arrive(shared.q.empty, y)
            send_dq(warpgroup_mma_wait(0, [dq_second]), shared, 2 * y + 1, 1)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        mbarrier.wait(shared.dq.empty.index(1), 1)
        parts, last = add_partials(1, dk, keys, gqa_sums, call, tile)
        if last:
            dk = scaled(parts, call.shape.factor)
            store_pieces(dK, dk, keys, call.packed, keys.j0, call.shape.d, shared.dq.memory.index(1), tile.D)
            wait_stores()
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)
