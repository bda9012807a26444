"""Find a tile of queries, and the key tiles that it loops over.

A `Loop` is the range of that loop.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.ranges import Place, key_range, list_at, tile_at
from ...tile.rows import rows_of
from ..parts.channel import arrive, named_barrier, wait


class Loop(NamedTuple):
    """Hold the loop over one query tile's key tiles: positions hi - 1 down to lo, of which [full_lo, full_hi) need no
    mask."""

    lo: object
    full_lo: object
    full_hi: object
    hi: object
    some: object
    """Says whether any key is seen; if none is, the loop takes tile 0, all of it masked."""
    lists: object
    """Says where tiles are listed, if the mask is no interval."""


@gluon.jit
def tiles_of(call, tile: gl.constexpr):
    """Count all tiles: of queries, times the parts of V's columns."""
    return call.shape.tiles * call.shape.heads * tile.V_PARTS


@gluon.jit
def column_of(t, tile: gl.constexpr):
    """Return V's first column in tile t of all. The parts of a tile of queries come one after the other."""
    return t % tile.V_PARTS * tile.D_V


@gluon.jit
def query_tile(t, call, tile: gl.constexpr):
    """Locate tile t of queries: return its place, its number in the head, and the first rows of queries and keys."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    matrix, m = t, call.shape.tiles - 1
    if call.shape.tiles > 1:  # short calls are spared the divisions
        matrix, m = call.order(t, call.shape.tiles, call.shape.heads, call.shape.section)
    b, h = matrix // call.shape.H, matrix % call.shape.H
    q0, M, k0, N = rows_of(call.packed, b, call.shape.M, call.shape.N)
    return Place(b, h, matrix, m * (64 * WARPGROUPS), M, N, N - M), m, q0, k0


@gluon.jit
def loop_of(place, m, variant, tile: gl.constexpr):
    """Return the loop over query tile m's key tiles. It has at least one, so that a row without keys gets its zeros the
    same way."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    lists = list_at(variant.lists, place.b, place.h, m)
    lo, full_lo, full_hi, hi = key_range(variant, lists, place, 64 * WARPGROUPS, B_C)
    return Loop(lo, full_lo, full_hi, gl.maximum(hi, lo + 1), hi > lo, lists)


@gluon.jit
def part_of(loop, place, row0, variant, tile: gl.constexpr):
    """Return the part of a query tile's loop that 64 of its rows see; all of it where tiles come from a list. At the
    end, leave out fewer tiles than there are stages. For before the producer sends the next tile's number, every key
    tile must be in a stage."""
    B_C: gl.constexpr = tile.B_C
    KV_STAGES: gl.constexpr = tile.KV_STAGES
    if variant.lists is None:
        rows = Place(place.b, place.h, place.matrix, row0, place.M, place.N, place.shift)
        lo, full_lo, full_hi, hi = key_range(variant, 0, rows, 64, B_C)
        hi = gl.minimum(gl.maximum(hi, loop.lo + 1), loop.hi)
        lo = gl.minimum(gl.maximum(lo, loop.lo), gl.minimum(hi, loop.lo + KV_STAGES) - 1)
        return Loop(lo, full_lo, full_hi, hi, loop.some, loop.lists)
    else:
        return loop


@gluon.jit
def skip_tiles(W: gl.constexpr, shared, y, count, tile: gl.constexpr, K_PIECES: gl.constexpr = 1):
    """Skip `count` key tiles that warpgroup W has no use for, and return the next tile's number. W takes part in
    ping-pong all the same."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    PINGPONG: gl.constexpr = tile.PINGPONG
    for _ in range(count):
        for p in gl.static_range(K_PIECES):
            wait(shared.k.full, y * K_PIECES + p)
        if PINGPONG:
            named_barrier("sync", W)
            named_barrier("arrive", (W + 1) % WARPGROUPS)
        if shared.bits is not None:
            wait(shared.bits.full, y * WARPGROUPS + W)
            arrive(shared.bits.empty, y * WARPGROUPS + W)
        for p in gl.static_range(K_PIECES):
            arrive(shared.k.empty, y * K_PIECES + p)
        if tile.KV_STAGES == 1:  # else the next use is taken for complete: the phase of the one before looks the same
            wait(shared.v.full, y)
        y += 1
    return y


@gluon.jit
def key_tile(variant, loop, x):
    """Return the key tile at position x."""
    return gl.where(loop.some, tile_at(variant.lists, loop.lists, x), 0)


@gluon.jit
def is_partial(x, loop):
    """Return whether the key tile at position x needs the mask."""
    return (x < loop.full_lo) | (x >= loop.full_hi)
