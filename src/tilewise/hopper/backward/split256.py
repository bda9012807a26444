"""Compute the backward's products at head size 256 by a dK/dV split: one group owns dV (S, P), the other dK (dP, dS).

P goes one way through shared memory, dS back. S is transposed, as in gradients.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..parts.channel import arrive, stage, wait
from ..parts.dropout_bits import apply_bits, apply_dropout, read_bits
from ..parts.queue import receive_tile
from ..parts.ragged import zero_keys, zero_queries
from .gqa_reduce import add_partials
from .gradients import gradient, send_dq, tile_probabilities
from .keys import exists, first_step, is_partial, keys_of, next_step, place_of
from .outputs import store_gradient, wait_stores


@gluon.jit
def dq_columns(ds, k, COLUMN: gl.constexpr, layout: gl.constexpr):
    """Start dQ[:, COLUMN : COLUMN + 64] = dS K."""
    zero = gl.zeros([64, 64], gl.float32, layout)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(COLUMN, 64, 1), zero, use_acc=False, is_async=True)


@gluon.jit
def store_halves(G, x, keys, packed, d, buffer):
    """Store 64 rows of 256 columns of dK or dV, in two boxes."""
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)).split()
    store_gradient(G, left, keys, packed, keys.j0, d, 0, buffer)
    wait_stores()
    store_gradient(G, right, keys, packed, keys.j0, d, HALF, buffer)
    wait_stores()


@gluon.jit
def dv_group(dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute S, P, dV, and the left half of dQ."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    k = shared.k.index(0).reshape([B_C, D])
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        dv = gl.zeros([B_C, D], gl.float32, acc)
        wait(shared.kv.full, n)
        zero_keys(keys, call.packed, shared, n, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            place = place_of(step, keys, call, B_R)
            partial = is_partial(step, step.loop)
            zero_queries(place, call.packed, shared, y, tile)
            wait(shared.q.full, y)
            q = stage(shared.q.memory, y).reshape([B_R, D])
            S = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            logs = stage(shared.logs, y).load(gl.SliceLayout(0, s_layout))
            words = read_bits(shared.bits, y, 0, zero)
            S = warpgroup_mma_wait(0, [S])
            arrive(shared.q.empty, y)
            P = tile_probabilities(S, logs, place, keys.j0, partial, call.variant, shared, call.shape.unit, y)
            # the other group multiplies by dP - D: a score's gradient is linear in it, entry by entry
            ones = gl.full([B_C, B_R], 1.0, gl.float32, s_layout)
            p = apply_dropout(P.to(dtype), words, call.variant)
            dS = gradient(P, ones, logs[None, :], 0.0, S, place, keys.j0, call.variant, shared, y)
            shared.p.memory.store(dS.to(dtype))
            arrive(shared.p.full, y)
            wait(shared.do.full, y)
            do = stage(shared.do.memory, y).reshape([B_R, D])
            dv_next = warpgroup_mma(gl.convert_layout(p, a_layout), do, dv, is_async=True)
            wait(shared.ds.full, y)
            dq = dq_columns(shared.ds.memory, k, 0, dq_layout)
            dv, dq = warpgroup_mma_wait(0, [dv_next, dq])
            dq_second = dq_columns(shared.ds.memory, k, 64, dq_layout)
            arrive(shared.do.empty, y)
            send_dq(dq, shared, 2 * y, 0)
            send_dq(warpgroup_mma_wait(0, [dq_second]), shared, 2 * y + 1, 0)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        mbarrier.wait(shared.dq.empty.index(0), 1)
        if call.variant.dropout is not None:
            dv = dv * call.variant.dropout.rescale
        parts, last = add_partials(0, (dv,), keys, gqa_sums, call, tile)
        if last:
            store_halves(dV, parts[0], keys, call.packed, call.shape.d_v, shared.dq.memory.index(0))
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)


@gluon.jit
def dk_group(dK, gqa_sums, shared, call, tile: gl.constexpr):
    """Compute dP, dS, dK, and the right half of dQ."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    D: gl.constexpr = tile.D
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    k = shared.k.index(0).reshape([B_C, D])
    v = shared.v.index(0).reshape([B_C, D])
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, 4)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        dk = gl.zeros([B_C, D], gl.float32, acc)
        wait(shared.kv.full, n)
        zero_keys(keys, call.packed, shared, n, tile)
        step = first_step(keys, call.variant, tile)
        while exists(step):
            place = place_of(step, keys, call, B_R)
            zero_queries(place, call.packed, shared, y, tile)
            wait(shared.do.full, y)
            do = stage(shared.do.memory, y).reshape([B_R, D])
            dP = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
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
            q = stage(shared.q.memory, y).reshape([B_R, D])
            dq = dq_columns(shared.ds.memory, k, 128, dq_layout)
            dk_next = warpgroup_mma(gl.convert_layout(ds, a_layout), q, dk, is_async=True)
            dq = warpgroup_mma_wait(1, [dq])
            send_dq(dq, shared, 2 * y, 1)
            dk = warpgroup_mma_wait(0, [dk_next])
            dq_second = dq_columns(shared.ds.memory, k, 192, dq_layout)
            arrive(shared.q.empty, y)
            send_dq(warpgroup_mma_wait(0, [dq_second]), shared, 2 * y + 1, 1)
            y += 1
            step = next_step(step, keys, call.variant, tile)
        arrive(shared.kv.empty, 0)
        mbarrier.wait(shared.dq.empty.index(1), 1)
        parts, last = add_partials(1, (dk,), keys, gqa_sums, call, tile)
        if last:
            store_halves(dK, parts[0] * call.shape.factor, keys, call.packed, call.shape.d, shared.dq.memory.index(1))
        n += 1
        t = receive_tile(shared.tile_ids, n, 4)
