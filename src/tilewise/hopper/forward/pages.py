"""Read keys and values from a cache, contiguous or in pages.

In shared memory a tile of keys is panels of 64 columns, one after the other. So rows that lie inside one page are one
box of TMA a panel, and whoever reads the tile cannot tell it from one that lay in one piece.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.cache import entry_of, keys_of, queries_of
from ...tile.masks import key_range_of
from ...tile.ranges import Place
from ..parts import triton_compat
from ..parts.channel import expect, stage, wait
from ..parts.pieces import tile_at
from ..parts.ragged import zero_outside, zero_values
from .queries import query_tile


@gluon.jit
def located(t, call, tile: gl.constexpr):
    """Locate tile t of all, as `query_tile` does."""
    if tile.PAGE is None:
        return query_tile(t // tile.V_PARTS, call, tile)
    else:
        return query_tile_in_cache(t, call, tile)


@gluon.jit
def query_tile_in_cache(t, call, tile: gl.constexpr):
    """Locate tile t of all, as `query_tile` does. Packed queries are counted in tiles over all sequences."""
    ROWS: gl.constexpr = 64 * tile.WARPGROUPS
    matrix, m = call.order(t, call.shape.tiles, call.shape.heads, call.shape.section)
    b, h = matrix // call.shape.H, matrix % call.shape.H
    if call.packed is None:
        q0, M = 0, call.shape.M
    else:
        b, m = sequence_of(call.cache, m, ROWS)
        q0, M = queries_of(call.cache, b)
    k0, N = keys_of(call.cache, b)
    return Place(b, h, matrix, m * ROWS, M, N, N - M), m, q0, k0


@gluon.jit
def sequence_of(cache, m, ROWS: gl.constexpr):
    """Return the sequence that has the m-th of all tiles of queries, and the tile's number in it. A sequence begins a
    tile of its own, so tiles are no more than rows // ROWS and one for each sequence; those left over are empty."""
    b = m * 0
    end = b + cache.B // 2
    while end - b > 1:
        middle = (b + end) // 2
        if first_tile(cache, middle, ROWS) <= m:
            b = middle
        else:
            end = middle
    return b, m - first_tile(cache, b, ROWS)


@gluon.jit
def first_tile(cache, b, ROWS: gl.constexpr):
    """Return the number of sequence b's first tile of queries."""
    q0, _ = queries_of(cache, b)
    return q0 // ROWS + b


@gluon.jit
def load_rows(X, channel, y, call, place, h_k, row, tile: gl.constexpr):
    """Load the rows of a cache from `row` on into use y's stage. Pages without a key are read as zeros, and their
    entries of the table are not read."""
    ROWS: gl.constexpr = X.block_type.shape[2]
    B_C: gl.constexpr = tile.B_C
    PANELS: gl.constexpr = 1 if tile.PAGE == 0 else tile.D // 64
    memory = channel.memory[0]
    STAGES: gl.constexpr = memory.shape[0]
    bar = expect(channel.full, y, X.block_type.nbytes * (B_C // ROWS * PANELS))
    entry = entry_of(call.cache, place.b)
    if tile.PAGE == 0:
        triton_compat.load(X, [entry.to(gl.int32), h_k, row, 0], bar, stage(memory, y))
    else:
        panels = triton_compat.reinterpret(memory, X.dtype, [STAGES * PANELS, 1, 1, B_C, 64], X.layout)
        pages = call.cache.table + entry * (call.cache.width // 2)
        for r in gl.static_range(B_C // ROWS):
            first = row + r * ROWS
            page = gl.load(pages + first // tile.PAGE, mask=first < place.N, other=-1)
            for c in gl.static_range(PANELS):
                part = panels.index(y % STAGES * PANELS + c).slice(r * ROWS, ROWS, 2)
                triton_compat.load(X, [page, h_k, first % tile.PAGE, 64 * c], bar, part)


@gluon.jit
def zero_unseen(place, j, call, shared, y, tile: gl.constexpr):
    """Zero the values of key tile j, use y, that no row of the query tile sees: a cache may hold NaN there, which would
    survive a P of 0."""
    B_C: gl.constexpr = tile.B_C
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    last_row = gl.minimum(place.i0 + 64 * WARPGROUPS, place.M) - 1
    first, _ = key_range_of(call.variant.mask, place.b, place.i0 + place.shift, place.N)
    _, end = key_range_of(call.variant.mask, place.b, last_row + place.shift, place.N)
    first, end = first - j * B_C, end - j * B_C
    if (first > 0) | (end < B_C):
        wait(shared.v.full, y)
        zero_outside(tile_at(shared.v.memory, y)[0], first, end)


@gluon.jit
def zero_hidden(place, j, call, shared, y, tile: gl.constexpr):
    """Zero the values of key tile j, use y, that no row may see: those past the end of a packed sequence, and of a
    cache those outside the query tile's range."""
    if tile.PAGE is None:
        zero_values(place, j, call.packed, shared, y, tile)
    else:
        zero_unseen(place, j, call, shared, y, tile)
