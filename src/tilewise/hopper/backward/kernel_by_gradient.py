"""Compute dQ, dK and dV on Hopper beyond head size 128.

Registers of a group of warps hold one gradient of 64 keys, so each group has one (see by_gradient.py). Sums of dQ would
pass through memory for each tile of S, and have 4 D bytes a query. dS has 128, so it passes through memory instead.
Programs take items from a queue (see items.py): key tiles, with a loop over the query tiles that see them, and query
tiles, with a loop over key tiles (see dq.py).

    load          one warp           loads what an item needs, by TMA
    store_ds      one warp           stores dS of key tiles, by TMA
    compute       2 groups of 4 warps
    produce_bits  2 warps            with dropout only: generates its mask bits
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..parts.call import Call
from ..parts.channel import Channel, barriers, wait_dependencies
from ..parts.dropout_bits import bits
from ..parts.pieces import allocate
from ..parts.queue import fetch_tile, reset_counter
from .by_gradient import compute
from .dq import load_ds, range_of_ds, store_ds
from .items import (
    Message,
    Shape,
    has_rows,
    item_at,
    items,
    keys_at,
    keys_done,
    message_channel,
    queries_at,
    queries_done,
    receive,
    send,
    sequence_at,
)
from .load import bits_of_tile, load_tile
from .outputs import Gradient


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants. Fields that kernel.py's `Tile` has are as there."""

    B_R: int
    B_C: int
    D: int
    D_V: int
    Q_STAGES: int
    DO_STAGES: int
    GROUP: int
    GQA_PROGRAMS: int
    DROPOUT_WARPS: int
    PAIRED: bool
    """Says whether two key tiles share a row of dS in memory, as causal ones can (see `ds_at`)."""


class Shared(NamedTuple):
    """Hold everything in shared memory; K and V once, P and dS in two stages."""

    k: object
    v: object
    kv: object
    q: object
    logs: object
    do: object
    delta: object
    ds: object
    p: object
    messages: object
    bits: object
    shift: object


@gluon.jit
def load(Q, K, V, dO, L, D, dS, work, shared, call, tile: gl.constexpr):
    """Run the producer warp. It counts items without rows as done."""
    shape = call.shape
    n = 0  # items so far
    u = 0  # tiles of keys so far
    y = 0  # uses of the memory of Q and dO so far
    t = fetch_tile(work.counter)
    wait_dependencies()  # for L, D and zeros
    while t < items(shape, tile):
        item = item_at(t, shape, tile)
        if item.exists:
            b = sequence_at(item, call, tile)
            if item.of_keys:
                keys = keys_at(item, b, call, tile)
                if (keys.j0 >= 0) & (keys.j0 < keys.N):
                    send(shared.messages, Message(t, b, 0, 0), n)
                    n += 1
                    y = load_tile(Q, K, V, dO, L, D, keys, u, 0, y, shared, call, tile)
                    u += 1
                else:
                    gl.atomic_add(keys_done(work, item.chunk, shape, tile), 1, sem="release")
            else:
                queries = queries_at(item, b, call, tile)
                if has_rows(queries, shape):
                    lo, hi = range_of_ds(queries, work, call, tile)
                    send(shared.messages, Message(t, b, lo, hi), n)
                    n += 1
                    y = load_ds(K, dS, queries, lo, hi, y, work, shared, call, tile)
                else:
                    gl.atomic_add(queries_done(work, item.chunk, shape, tile), 2, sem="release")
        t = fetch_tile(work.counter)
    send(shared.messages, Message(t, 0, 0, 0), n)
    reset_counter(work.counter)


@gluon.jit
def produce_bits(shared, call, tile: gl.constexpr):
    """Generate dropout bits once a tile of dS, for both groups."""
    y = 0
    n = 0
    message = receive(shared.messages, n, tile.DROPOUT_WARPS)
    while message.t < items(call.shape, tile):
        item = item_at(message.t, call.shape, tile)
        if item.of_keys:
            y = bits_of_tile(keys_at(item, message.b, call, tile), y, shared, call, tile)
        n += 1
        message = receive(shared.messages, n, tile.DROPOUT_WARPS)


@gluon.jit
def counts_of(shape):
    """Return a launch's shape, as in kernel.py."""
    return Shape(
        shape.unit, shape.factor, shape.M // 2, shape.N // 2, shape.d // 2, shape.d_v // 2, shape.B // 2, shape.H // 2,
        shape.blocks // 2, shape.key_tiles // 2, shape.query_tiles // 2, shape.heads // 2, shape.chunks // 2,
        shape.tiles // 2, shape.section // 2, shape.resident // 2, shape.seen // 2, shape.semaphores // 2,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["packed", "shape", "variant"])
def attention_backward_by_gradient(
    Q, K, V, dO, L, D, dS, dQ, dK, dV, strides, work, packed, variant, shape, tile: gl.constexpr
):  # fmt: skip
    """Compute dQ, dK and dV."""
    shape = counts_of(shape)
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    DO_STAGES: gl.constexpr = tile.DO_STAGES
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    dtype: gl.constexpr = Q.dtype
    dQ, dK, dV = Gradient(dQ, strides[0]), Gradient(dK, strides[1]), Gradient(dV, strides[2])
    k = allocate(K, dtype, 1, B_C, tile.D)
    v = allocate(V, dtype, 1, B_C, tile.D_V)
    shared = Shared(
        k,
        v,
        Channel(k, barriers(1, 1), barriers(1, 2)),
        Channel(allocate(Q, dtype, Q_STAGES, B_R, tile.D), barriers(Q_STAGES, 1), barriers(Q_STAGES, 2)),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout),
        Channel(allocate(dO, dtype, DO_STAGES, B_R, tile.D_V), barriers(DO_STAGES, 1), barriers(DO_STAGES, 2)),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, B_R], D.layout),
        Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], dS.layout), barriers(2, 1), barriers(2, 1)),
        Channel(gl.allocate_shared_memory(dtype, [2, B_C, B_R], dS.layout), barriers(2, 1), barriers(2, 1)),
        message_channel(4 if DROPOUT_WARPS else 3),
        bits(B_C, 1, 2) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, B_R], L.layout) if work.shift is not None else None,
    )
    fence_async_shared()
    if DROPOUT_WARPS:
        gl.warp_specialize(
            [
                (compute, (0, dQ, dV, work, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dQ, dK, work, shared, Call(shape, packed, variant), tile)),
                (produce_bits, (shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, dS, work, shared, Call(shape, packed, variant), tile)),
                (store_ds, (dS, work, shared, Call(shape, packed, variant), tile)),
            ],
            [4, DROPOUT_WARPS, 1, 1], [232, 40, 40, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (compute, (0, dQ, dV, work, shared, Call(shape, packed, variant), tile)),
                (compute, (1, dQ, dK, work, shared, Call(shape, packed, variant), tile)),
                (load, (Q, K, V, dO, L, D, dS, work, shared, Call(shape, packed, variant), tile)),
                (store_ds, (dS, work, shared, Call(shape, packed, variant), tile)),
            ],
            [4, 1, 1], [240, 32, 32],
        )  # fmt: skip
