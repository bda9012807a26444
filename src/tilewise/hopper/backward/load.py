"""Load the tiles of a key tile's loop, and generate their dropout bits: what the backward's main kernels share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts import triton_compat
from ..parts.channel import arrive, expect, stage, wait_before
from ..parts.dropout_bits import dropout_words, in_whole
from ..parts.pieces import bytes_of, load_pieces
from .keys import exists, first_step, next_step, place_of, query_block, tile_of


@gluon.jit
def load_queries(Q, dO, L, D, step, keys, y, shared, call, tile: gl.constexpr):
    """Load the query tile of an iteration, as use y."""
    B_R: gl.constexpr = tile.B_R
    b = keys.b if call.packed is None else 0
    first = keys.q0 + tile_of(step, keys, call.variant) * B_R
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


@gluon.jit
def load_tile(Q, K, V, dO, L, D, keys, n, k_stage, y, shared, call, tile: gl.constexpr):
    """Load K and V of key tile n, and all query tiles of its loop, from use y on. Return the next use."""
    b = keys.b if call.packed is None else 0
    wait_before(shared.kv.empty, n)
    bar = expect(shared.kv.full, n, bytes_of(K.block_type, tile.D) + bytes_of(V.block_type, tile.D_V))
    load_pieces(K, b, keys.h_k, keys.k0 + keys.j0, bar, shared.k, k_stage)
    load_pieces(V, b, keys.h_k, keys.k0 + keys.j0, bar, shared.v, 0)
    step = first_step(keys, call.variant, tile)
    while exists(step):
        load_queries(Q, dO, L, D, step, keys, y, shared, call, tile)
        y += 1
        step = next_step(step, keys, call.variant, tile)
    return y


@gluon.jit
def bits_of_tile(keys, y, shared, call, tile: gl.constexpr):
    """Generate the dropout bits of a key tile's loop, from use y on. Return the next use."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    seed = gl.load(call.variant.dropout.seed)
    threshold = gl.to_tensor(call.variant.dropout.threshold).to(gl.uint32)
    step = first_step(keys, call.variant, tile)
    while exists(step):
        place = place_of(step, keys, call, B_R)
        matrix, i0, j0 = in_whole(call.variant.dropout.counters, place, place.i0, keys.j0)
        words = dropout_words(seed, threshold, matrix, i0, j0, B_C, B_R, True, tile.DROPOUT_WARPS)
        wait_before(shared.bits.empty, y)
        stage(shared.bits.memory, y).store(words)
        arrive(shared.bits.full, y)
        y += 1
        step = next_step(step, keys, call.variant, tile)
    return y
