"""Compute the backward's products beyond head size 128: each of two groups of warps has a gradient.

One computes S, P and dV of a key tile, the other dP, dS and dK. P goes from the first to the second through shared
memory, and dS from there to memory, in two stages each. For dQ of a query tile each group has 64 rows (see dq.py).
S is transposed, as in gradients.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..parts.channel import arrive, stage, wait, wait_before
from ..parts.dropout_bits import apply_bits, apply_dropout, read_bits
from ..parts.pieces import contract, expand, scaled, tile_at, tile_of, wait_for, zeros_of
from ..parts.ragged import zero_keys, zero_queries
from .dq import compute_dq
from .gqa_reduce import add_partials
from .gradients import gradient, tile_probabilities
from .items import item_at, items, keys_at, receive
from .keys import exists, first_step, is_partial, next_step, place_of
from .outputs import store_pieces, wait_stores


@gluon.jit
def wait_for_both_stages(bars, n):
    """Wait until both stages are empty, after n uses."""
    for s in gl.static_range(2):
        wait_before(bars, n + s)


@gluon.jit
def probabilities_of(k, y, z, step, keys, shared, call, tile: gl.constexpr):
    """Compute P of use y, and release Q; its dropout bits are use z. Return P after dropout, and P as the group that
    computes dS wants it, both in 16 bits. # (B_c, B_r)"""
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
    words = read_bits(shared.bits, z, 0, zero)
    S = warpgroup_mma_wait(0, [S])
    arrive(shared.q.empty, y)
    P = tile_probabilities(S, logs, place, keys.j0, partial, call.variant, shared, call.shape.unit, y)
    # that group multiplies by dP - D: a score's gradient is linear in it, entry by entry
    ones = gl.full([B_C, B_R], 1.0, gl.float32, s_layout)
    p = apply_dropout(P.to(dtype), words, call.variant)
    dS = gradient(P, ones, logs[None, :], 0.0, S, place, keys.j0, call.variant, shared, y)
    return p, dS.to(dtype)


@gluon.jit
def dv_of_keys(dV, keys, y, z, work, shared, call, tile: gl.constexpr):
    """Compute S, P and dV of a key tile, which leaves through the memory of P. Return the next uses: y of Q and dO, z
    of what groups exchange."""
    k = tile_of(shared.k, 0)
    dv = zeros_of(tile.B_C, tile.D_V)
    step = first_step(keys, call.variant, tile)
    while exists(step):
        p, dS = probabilities_of(k, y, z, step, keys, shared, call, tile)
        wait_before(shared.p.empty, z)
        stage(shared.p.memory, z).store(dS)
        arrive(shared.p.full, z)
        wait(shared.do.full, y)
        dv = wait_for(0, expand(p, tile_at(shared.do.memory, y), dv))
        arrive(shared.do.empty, y)
        y += 1
        z += 1
        step = next_step(step, keys, call.variant, tile)
    arrive(shared.kv.empty, 0)
    if call.variant.dropout is not None:
        dv = scaled(dv, call.variant.dropout.rescale)
    parts, last = add_partials(0, dv, keys, work.gqa_sums, call, tile)
    if last:
        wait_for_both_stages(shared.p.empty, z)
        store_pieces(dV, parts, keys, call.packed, keys.j0, call.shape.d_v, shared.p.memory, tile.D_V)
        wait_stores()
    return y, z


@gluon.jit
def dk_of_keys(dK, keys, y, z, work, shared, call, tile: gl.constexpr):
    """Compute dP, dS and dK of a key tile, which leaves through the memory of dS. Return the next uses, as there. P, dO
    and delta are released once dS is stored: before, loads of delta may be under way, and nothing orders them before
    TMA writes the next."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_R, 16])
    zero = gl.zeros([B_C, B_R], gl.float32, s_layout)
    v = tile_of(shared.v, 0)
    dk = zeros_of(B_C, tile.D)
    step = first_step(keys, call.variant, tile)
    while exists(step):
        place = place_of(step, keys, call, B_R)
        zero_queries(place, call.packed, shared, y, tile)
        wait(shared.do.full, y)
        dP = contract(v, tile_at(shared.do.memory, y), zero)
        delta = stage(shared.delta, y).load(gl.SliceLayout(0, s_layout))
        words = read_bits(shared.bits, z, 0, zero)
        dP = warpgroup_mma_wait(0, [dP])
        if call.variant.dropout is not None:
            dP = apply_bits(dP, words) * call.variant.dropout.rescale
        dP = dP - delta[None, :]
        wait(shared.p.full, z)
        P = stage(shared.p.memory, z).load(s_layout)
        ds = (P.to(gl.float32) * dP).to(dtype)
        wait_before(shared.ds.empty, z)
        stage(shared.ds.memory, z).store(ds)
        fence_async_shared()
        arrive(shared.ds.full, z)
        arrive(shared.p.empty, z)
        arrive(shared.do.empty, y)
        wait(shared.q.full, y)
        dk = wait_for(0, expand(ds, tile_at(shared.q.memory, y), dk))
        arrive(shared.q.empty, y)
        y += 1
        z += 1
        step = next_step(step, keys, call.variant, tile)
    arrive(shared.kv.empty, 0)
    parts, last = add_partials(1, dk, keys, work.gqa_sums, call, tile)
    if last:
        dk = scaled(parts, call.shape.factor)
        wait_for_both_stages(shared.ds.empty, z)
        store_pieces(dK, dk, keys, call.packed, keys.j0, call.shape.d, shared.ds.memory, tile.D)
        wait_stores()
    return y, z


@gluon.jit
def compute(W: gl.constexpr, dQ, dG, work, shared, call, tile: gl.constexpr):
    """Run group W: compute dV of key tiles, or dK if W is 1 (dG is either), and 64 rows of dQ of query tiles."""
    exchanged = shared.p if W == 0 else shared.ds
    y = 0
    z = 0
    u = 0
    n = 0
    message = receive(shared.messages, n, 4)
    while message.t < items(call.shape, tile):
        item = item_at(message.t, call.shape, tile)
        if item.of_keys:
            keys = keys_at(item, message.b, call, tile)
            wait(shared.kv.full, u)
            zero_keys(keys, call.packed, shared, 0, tile)
            if W == 0:
                y, z = dv_of_keys(dG, keys, y, z, work, shared, call, tile)
            else:
                y, z = dk_of_keys(dG, keys, y, z, work, shared, call, tile)
            u += 1
        else:
            wait_for_both_stages(exchanged.empty, z)
            y = compute_dq(W, dQ, item, message, y, exchanged.memory, work, shared, call, tile)
        n += 1
        message = receive(shared.messages, n, 4)
