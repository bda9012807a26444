"""Compute dK, dV and sums of dQ on Hopper: the backward's main kernel, for head sizes to 128.

A program owns B_c rows of K and V, and loops over the query tiles that see them.

    load          one warp      loads K and V once, then Q, L, dO and D of every query tile, by TMA
    add_dq        one warp      adds finished 64 x 64 blocks of dQ to their sum in memory, by TMA, and writes the
                                zeros that later key tiles will add to
    key_half      2 groups of 4 warps
                                compute the five products: see gradients.py
    produce_bits  2 or 4 warps  with dropout only: generates its mask bits

All of them loop over the same query tiles, which keys.py finds.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..parts.call import Call
from ..parts.channel import Channel, barriers, wait_dependencies
from ..parts.dropout_bits import bits
from ..parts.pieces import allocate
from ..parts.queue import fetch_tile, receive_tile, reset_counter, send_tile, skip_to, tile_channel
from .add_dq import add_dq
from .gradients import key_half
from .keys import keys_of
from .load import bits_of_tile, load_tile
from .outputs import Gradient


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
    tile_ids: object
    bits: object
    """Holds the channel of dropout bits, or None."""
    shift: object
    """Holds what logits are shifted by, beside `logs`, or None."""


@gluon.jit
def load(Q, K, V, dO, L, D, shared, counter, call, tile: gl.constexpr):
    """Run the producer warp."""
    n = 0  # tiles of keys so far
    y = 0  # tiles of queries so far
    t = fetch_tile(counter)
    wait_dependencies()  # for L and D
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        if keys.j0 < keys.N:  # packed sequences may be shorter
            send_tile(shared.tile_ids, t, n)
            y = load_tile(Q, K, V, dO, L, D, keys, n, n % tile.K_STAGES, y, shared, call, tile)
            n += 1
        elif tile.SEMAPHORE_TILES == 0:  # nor are there any tiles until the next section
            skip_to(counter, (t // (call.shape.section * call.shape.tiles) + 1) * call.shape.section * call.shape.tiles)
        t = fetch_tile(counter)
    send_tile(shared.tile_ids, t, n)
    reset_counter(counter)


@gluon.jit
def produce_bits(shared, call, tile: gl.constexpr):
    """Generate dropout bits once a tile. Each group reads those of its keys."""
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    y = 0
    n = 0
    t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)
    while t < call.shape.tiles * call.shape.heads:
        keys = keys_of(t, call, tile)
        y = bits_of_tile(keys, y, shared, call, tile)
        n += 1
        t = receive_tile(shared.tile_ids, n, DROPOUT_WARPS)


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
    dtype: gl.constexpr = Q.dtype
    dK, dV = Gradient(dK, strides[0]), Gradient(dV, strides[1])  # as arguments, descriptors must stand alone
    kv_full = barriers(1, 1)
    of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_C, B_R], dtype)
    ds_full = barriers(2, 2)  # for both: the compiler would give an unused barrier's memory to K, not invalidated
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
        Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], of_ds), ds_full, ds_full),
        Channel(gl.allocate_shared_memory(gl.float32, [2, 16, 256], dQ.layout), barriers(2, 1), barriers(2, 1)),
        tile_channel(2 + (2 if DROPOUT_WARPS else 1)),
        bits(B_C, 1, 2) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout) if scratch.shift is not None else None,
    )
    fence_async_shared()
    if DROPOUT_WARPS:
        REGISTERS: gl.constexpr = 216 if DROPOUT_WARPS == 4 else 232
        LEFT: gl.constexpr = (488 if DROPOUT_WARPS == 4 else 504) - 2 * REGISTERS
        gl.warp_specialize(
            [
                (key_half, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (key_half, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (produce_bits, (shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, DROPOUT_WARPS, 1, 1], [REGISTERS, LEFT, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (key_half, (0, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (key_half, (1, dK, dV, scratch.gqa_sums, shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, shared, counter, Call(shape, packed, variant), tile)),
                (add_dq, (dQ, scratch, shared, Call(shape, packed, variant), tile)),
            ],
            [4, 1, 1], [240, 24, 24],
        )  # fmt: skip
