"""Store dK and dV through shared memory, by TMA; in fp32, for which it has no room, from registers."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..parts import triton_compat
from ..parts.channel import stage
from ..parts.pieces import pieces_of
from ..parts.ragged import store_inside


class Gradient(NamedTuple):
    """Address dK or dV."""

    box: object
    """Describes it to TMA."""
    rows: object
    """Holds its strides, for gradients in fp32 and the ragged tails of packed sequences; else None."""


@gluon.jit
def store_pieces(G, pieces, keys, packed, row, d, buffer, COLUMNS: gl.constexpr):
    """Store 64 rows of dK or dV, box after box through `buffer`."""
    PIECES: gl.constexpr = pieces_of(COLUMNS)
    column = 0
    for p in gl.static_range(len(PIECES)):
        store_boxes(G, pieces[p], keys, packed, row, d, column, buffer, PIECES[p] // G.box.block_shape[3], p == 0)
        column += PIECES[p]


@gluon.jit
def store_boxes(G, x, keys, packed, row, d, column, buffer, COUNT: gl.constexpr, FIRST: gl.constexpr):
    """Store a piece in COUNT boxes; but for the FIRST of all, each waits for `buffer`."""
    if COUNT == 1:
        if not FIRST:
            wait_stores()
        store_gradient(G, x, keys, packed, row, d, column, buffer)
    else:
        HALF: gl.constexpr = COUNT // 2 * G.box.block_shape[3]
        left, right = x.reshape([64, 2, HALF]).permute((0, 2, 1)).split()
        store_boxes(G, left, keys, packed, row, d, column, buffer, COUNT // 2, FIRST)
        store_boxes(G, right, keys, packed, row, d, column + HALF, buffer, COUNT // 2, False)


@gluon.jit
def store_gradient(G, x, keys, packed, row, d, column, buffer):
    """Store rows of dK or dV, from `row` of the sequence and column `column` on, through `buffer`. For that memory, see
    `memory_of_gradients`."""
    if G.rows is None:
        store_box(G.box, x.to(G.box.dtype), keys.b, keys.h_k, row, column, buffer)
    elif G.rows.ptr.dtype.element_ty != G.box.dtype:
        store_inside(G.rows, x, keys.b, keys.h_k, keys.k0 + row, keys.N - row, d, column)
    else:
        x = x.to(G.box.dtype)
        if row + x.shape[0] <= keys.N:
            store_box(G.box, x, 0, keys.h_k, keys.k0 + row, column, buffer)
        else:
            store_inside(G.rows, x, keys.b, keys.h_k, keys.k0 + row, keys.N - row, d, column)


@gluon.jit
def store_box(G, x, b, h, row, column, buffer):
    """Store one box of TMA."""
    out = triton_compat.reinterpret(buffer, G.dtype, G.block_shape, G.layout)
    out.store(x.reshape(G.block_shape))
    fence_async_shared()
    triton_compat.barrier()
    triton_compat.store(G, [b, h, row, column], out)


@gluon.jit
def memory_of_gradients(W: gl.constexpr, n, dK, shared, tile: gl.constexpr):
    """Return the shared memory from which TMA takes group W's rows of dK and of dV of tile n. With two stages of K the
    two differ. They are halves of a piece of dQ, or dK takes those columns of K that only this group has read for
    dQ."""
    piece = shared.dq.memory.index(W)
    if tile.K_STAGES == 1:
        return piece, piece
    elif tile.D == 64:
        halves = triton_compat.reinterpret(piece, dK.box.dtype, [2] + dK.box.block_shape, dK.box.layout)
        return halves.index(0), halves.index(1)
    elif tile.D == 128:
        halves = triton_compat.reinterpret(stage(shared.k[0], n), dK.box.dtype, [2] + dK.box.block_shape, dK.box.layout)
        return halves.index(W), piece
    else:
        return stage(shared.k[W], n), piece


@gluon.jit
def wait_stores():
    """Wait until what this group stored is read, and its buffer may be written again."""
    tma.store_wait(0)
    triton_compat.barrier()
