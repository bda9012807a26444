"""Compute dK, dV and sums of dQ on Hopper: the backward's main kernel.

A program owns B_c rows of K and V, and loops over the query tiles that see them.

    load          one warp      loads K and V once, then Q, L, dO and D of every query tile, by TMA
    add_dq        one warp      adds finished 64 x 64 blocks of dQ to their sum in memory, by TMA, and writes the
                                zeros that later key tiles will add to
    compute       2 or 3 groups of 4 warps
                                compute the five products: see gradients.py, by_gradient.py, split_dkdv.py
    produce_bits  2 or 4 warps  with dropout only: generates its mask bits

All of them loop over the same query tiles, which keys.py finds.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import (
    Channel,
    arrive,
    barriers,
    expect,
    stage,
    wait_before,
    wait_dependencies,
)
from ..parts.dropout_bits import bits, dropout_words, in_whole
from ..parts.pieces import allocate, bytes_of, load_pieces
from ..parts.queue import fetch_tile, receive_tile, reset_counter, send_tile, skip_to, tile_channel
from .add_dq import add_dq
from .by_gradient import compute_dk, compute_dq, compute_dv, groups_of
from .gradients import key_half
from .keys import exists, first_step, keys_of, next_step, place_of, query_block, tile_of
from .outputs import Gradient
from .split_dkdv import dk_group, dv_group


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
    """Says whether each group of warps has gradients (dK/dV split), rather than half of the keys. Only then may V have
    other columns."""
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
def compute(W: gl.constexpr, dK, dV, gqa_sums, shared, call, tile: gl.constexpr):
    """Run warpgroup W's part of the products."""
    if not tile.SPLIT_DKDV:
        key_half(W, dK, dV, gqa_sums, shared, call, tile)
    elif groups_of(tile) == 3:
        if W == 0:
            compute_dv(dV, gqa_sums, shared, call, tile)
        elif W == 1:
            compute_dk(dK, gqa_sums, shared, call, tile)
        else:
            compute_dq(shared, call, tile)
    elif W == 0:
        dv_group(dV, gqa_sums, shared, call, tile)
    else:
        dk_group(dK, gqa_sums, shared, call, tile)


@gluon.constexpr_function
def registers_of_groups(tile):
    """Return the registers of a thread that computes dK, and of one that computes dQ, of three groups. The first group
    has what these and the other warps leave of 512."""
    return {160: (168, 112), 192: (184, 112), 224: (200, 96)}[tile.D]


@gluon.jit
def run_three_groups(
    Q, K, V, dO, L, D, dQ, dK, dV, scratch, shared, counter, packed, variant, shape, tile: gl.constexpr
):  # fmt: skip
    """Start the roles where each gradient has a group."""
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    OF_DK: gl.constexpr = registers_of_groups(tile)[0]
    OF_DQ: gl.constexpr = registers_of_groups(tile)[1]
    if DROPOUT_WARPS:
        gl.warp_specialize(
            [
                (compute, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (2, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (produce_bits, (shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, 4, DROPOUT_WARPS, 1, 1], [OF_DK, OF_DQ, 40, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (compute, (2, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, 4, 1, 1], [OF_DK, OF_DQ, 24, 24],
        )  # fmt: skip


@gluon.jit
def exchanges(dtype: gl.constexpr, tile: gl.constexpr):
    """Allocate the channels of dS and P, which groups exchange."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_C, B_R], dtype)
    if groups_of(tile) == 3:
        ds = Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], layout), barriers(2, 1), barriers(2, 1))
        p = Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], layout), barriers(2, 1), barriers(2, 1))
        return ds, p
    elif tile.SPLIT_DKDV:  # the group that waits for dS knows that P has been read
        ds_full, p_full = barriers(1, 1), barriers(1, 1)
        ds = Channel(gl.allocate_shared_memory(dtype, [B_C, B_R], layout), ds_full, ds_full)
        return ds, Channel(gl.allocate_shared_memory(dtype, [B_C, B_R], layout), p_full, p_full)
    else:  # they do not exchange P; the compiler would give an unused barrier's memory to K, not invalidated
        full = barriers(2, 2)
        ds = Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], layout), full, full)
        return ds, ds


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
    GROUPS: gl.constexpr = groups_of(tile)
    dtype: gl.constexpr = Q.dtype
    dK, dV = Gradient(dK, strides[0]), Gradient(dV, strides[1])  # as arguments, descriptors must stand alone
    kv_full = barriers(1, 1)
    ds, p = exchanges(dtype, tile)
    k = allocate(K, dtype, K_STAGES, B_C, tile.D)
    v = allocate(V, dtype, 1, B_C, tile.D_V)
    shared = Shared(
        k,
        v,
        Channel(k, kv_full, barriers(1, GROUPS)),
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
        ds,
        Channel(gl.allocate_shared_memory(gl.float32, [2, 16, 256], dQ.layout), barriers(2, 1), barriers(2, 1)),
        p,
        tile_channel(GROUPS + (2 if DROPOUT_WARPS else 1)),
        bits(B_C, 1, 2) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout) if scratch.shift is not None else None,
    )
    fence_async_shared()
    if GROUPS == 3:
        run_three_groups(Q, K, V, dO, L, D, dQ, dK, dV, scratch, shared, counter, packed, variant, shape, tile)
    elif DROPOUT_WARPS:
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
