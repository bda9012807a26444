"""Handle the ragged tails of packed sequences. TMA loads whole boxes, so a sequence's last box also reads rows of the
next.

Zero those rows after the load; never store them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...tile.rows import fill_unused, origin
from . import triton_compat
from .channel import wait
from .pieces import tile_at, tile_of


@gluon.jit
def zero_from(memory, row):
    """Zero a tile's rows from `row` on: there lies another sequence, whose NaN would survive a P of 0."""
    zero_outside(memory, 0, row)


@gluon.jit
def zero_all_from(pieces, row):
    """Do so in all pieces of a tile."""
    for p in gl.static_range(len(pieces)):
        zero_from(pieces[p], row)


@gluon.jit
def zero_outside(memory, first, end):
    """Zero a tile's rows except those from `first` up to `end`."""
    ROWS: gl.constexpr = memory.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for r in gl.static_range(ROWS // 16):
        if (first > 16 * r) | (end < 16 * (r + 1)):
            part = memory.slice(16 * r, 16, 0)
            rows = 16 * r + gl.arange(0, 16, gl.SliceLayout(1, layout))
            inside = (rows >= first) & (rows < end)
            part.store(gl.where(inside[:, None], part.load(layout), 0.0))
    fence_async_shared()
    triton_compat.barrier()


@gluon.jit
def zero_keys(keys, packed, shared, n, tile: gl.constexpr):
    """Zero the keys and values past the end of a packed sequence."""
    if packed is not None:
        if keys.j0 + tile.B_C > keys.N:
            zero_all_from(tile_at(shared.k, n), keys.N - keys.j0)
            zero_all_from(tile_of(shared.v, 0), keys.N - keys.j0)


@gluon.jit
def zero_queries(place, packed, shared, y, tile: gl.constexpr):
    """Zero the rows of Q and dO past the end of a packed sequence."""
    if packed is not None:
        if place.i0 + tile.B_R > place.M:
            wait(shared.q.full, y)
            wait(shared.do.full, y)
            zero_all_from(tile_at(shared.q.memory, y), place.M - place.i0)
            zero_all_from(tile_at(shared.do.memory, y), place.M - place.i0)


@gluon.jit
def zero_queries_past(q, place, row0, packed):
    """Zero the rows of a warpgroup's Q past the end of a packed sequence. Codes of 8 bits have scales of 0 there."""
    if packed is not None and q[0].dtype.primitive_bitwidth == 16:
        if row0 + 64 > place.M:
            zero_all_from(q, place.M - row0)


@gluon.jit
def zero_values(place, j, packed, shared, y, tile: gl.constexpr):
    """Zero the values past the end of a packed sequence, in the forward's key tile j, use y. Codes of V are zeros
    there."""
    B_C: gl.constexpr = tile.B_C
    if packed is not None and tile.PV_BITS == 16:
        if (j + 1) * B_C > place.N:
            wait(shared.v.full, y)
            zero_all_from(tile_at(shared.v.memory, y), place.N - j * B_C)


@gluon.jit
def store_inside(O, o, b, h, first, M, d_v, column):
    """Store the rows below M from registers: past a packed sequence, a box of TMA would write over the next."""
    layout: gl.constexpr = o.type.layout
    rows = gl.arange(0, o.shape[0], gl.SliceLayout(1, layout))[:, None]
    columns = column + gl.arange(0, o.shape[1], gl.SliceLayout(0, layout))[None, :]
    at = origin(O, b, h, first) + rows.to(gl.int64) * O.row + columns
    gl.store(at, o, mask=(rows < M) & (columns < d_v))


@gluon.jit
def fill_outputs(unused, packed):
    """Fill a forward's outputs in rows of no sequence, by four warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    fill_unused(unused, packed, rows, gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :])
