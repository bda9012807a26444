"""Where the backward is: a tile of keys, and the query tiles that see it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tile.rows import rows_of
from ..tile.schedule import assign
from ..tile.visits import Place, list_at, query_range, tile_at
from .around import first_block


class Keys(NamedTuple):
    """The tile of keys of a program."""

    b: object
    h_k: object
    t: object
    j0: object
    q0: object
    k0: object
    M: object
    N: object


class Walk(NamedTuple):
    """The query tiles that see it: positions lo up to hi, of which [full_lo, full_hi) need no mask."""

    lo: object
    full_lo: object
    full_hi: object
    hi: object


class Visit(NamedTuple):
    """A visit of a tile of keys: a position in the walk of one of the query heads that share it."""

    h: object
    x: object
    end: object
    """Where this head's part of the walk in this band ends."""
    walk: object
    band: object
    """The first position of the band; see `first_visit`."""


@gluon.jit
def keys_of(t, shape, packed, tile: gl.constexpr):
    """Where tile t of all is. The first keys, seen by the most queries, come first. ORDERED, the last do, which have to
    add to dQ first: nobody waits for a tile that has not begun."""
    B_C: gl.constexpr = tile.B_C
    GROUP: gl.constexpr = tile.GROUP
    matrix, t_k = assign(t, shape.tiles, shape.heads, shape.section)
    if not tile.ORDERED:
        t_k = shape.tiles - 1 - t_k
    H_K = shape.H // GROUP
    b, h_k = matrix // H_K, matrix % H_K
    q0, M, k0, N = rows_of(packed, b, shape.M, shape.N)
    return Keys(b, h_k, t_k, t_k * B_C, q0, k0, M, N)


@gluon.jit
def first_visit(keys, shape, variant, tile: gl.constexpr):
    """The first visit of these keys. The walks of all query heads that share them are one, which goes by bands of
    query tiles, the last band first, and in it one head after the other, so that what programs side by side read stays
    in the cache. Lists have no bands."""
    h = first_head(keys, shape, tile)
    walk = walk_over(keys, keys.j0, list_at(variant.visits, keys.b, h, keys.t), variant, tile.B_R, tile.B_C)
    band = 0
    if tile.GROUP > 1:
        band = gl.maximum(walk.hi - 1, 0) // shape.band * shape.band
    visit = in_band(h, walk, band, shape, tile)
    return skip_empty(visit, keys, shape, variant, tile)


@gluon.jit
def first_head(keys, shape, tile: gl.constexpr):
    """Which head is first in each band. Where there are bands, each tile of keys begins with another, so that few add
    to a tile of dQ at a time."""
    if tile.GROUP == 1:
        return keys.h_k
    else:
        return keys.h_k * tile.GROUP + gl.where(shape.bands > 1, keys.t, 0) % tile.GROUP


@gluon.jit
def in_band(h, walk, band, shape, tile: gl.constexpr):
    """The first visit of a head in a band."""
    if tile.GROUP == 1:
        return Visit(h, walk.lo, walk.hi, walk, band)
    else:
        return Visit(h, gl.maximum(walk.lo, band), gl.minimum(walk.hi, band + shape.band), walk, band)


@gluon.jit
def next_visit(visit, keys, shape, variant, tile: gl.constexpr):
    """The visit after this one; past the last, one that is not there."""
    visit = Visit(visit.h, visit.x + 1, visit.end, visit.walk, visit.band)
    return skip_empty(visit, keys, shape, variant, tile)


@gluon.jit
def skip_empty(visit, keys, shape, variant, tile: gl.constexpr):
    """This visit if it is there, else the next that is, of another head or band; if there is none, one that is not."""
    if tile.GROUP > 1:
        more = True
        while ~there(visit) & more:
            first = first_head(keys, shape, tile)
            h = keys.h_k * tile.GROUP + (visit.h - keys.h_k * tile.GROUP + 1) % tile.GROUP
            more = (h != first) | (visit.band > visit.walk.lo)
            walk, band = visit.walk, visit.band - gl.where(h == first, shape.band, 0)
            if variant.visits is not None:
                lists = list_at(variant.visits, keys.b, h, keys.t)
                walk = walk_over(keys, keys.j0, lists, variant, tile.B_R, tile.B_C)
            visit = in_band(h, walk, band, shape, tile)
    return visit


@gluon.jit
def bands(keys, shape, tile: gl.constexpr):
    """How many bands a walk has, of shape.band query tiles each."""
    return gl.cdiv(gl.cdiv(keys.M, tile.B_R), shape.band)


@gluon.jit
def there(visit):
    """Whether a visit is one."""
    return visit.x < visit.end


@gluon.jit
def tile_of(visit, keys, variant):
    """A visit's query tile."""
    return tile_at(variant.visits, list_at(variant.visits, keys.b, visit.h, keys.t), visit.x)


@gluon.jit
def query_block(visit, keys, shape, packed, variant, tile: gl.constexpr):
    """Which tile of all queries in memory that is, where every sequence begins with a tile of its own."""
    first = first_block(packed, keys.b, visit.h, shape.H, keys.q0, shape.blocks, tile.B_R)
    return first + tile_of(visit, keys, variant)


@gluon.jit
def walk_over(keys, j0, lists, variant, B_R: gl.constexpr, COUNT: gl.constexpr):
    """The query tiles of so many keys from j0 on. Keys that stick out past the last are masked everywhere."""
    lo, full_lo, full_hi, hi = query_range(variant, lists, keys.b, j0, keys.M, keys.N, B_R, COUNT)
    return Walk(lo, full_lo, gl.where(j0 + COUNT > keys.N, full_lo, full_hi), hi)


@gluon.jit
def part_of(visit, keys, j0, variant, tile: gl.constexpr):
    """The first visit of the 64 keys from j0 on, and their own walk, if tiles have PARTS; else the same."""
    if tile.PARTS:
        walk = visit.walk
        part = walk_over(keys, j0, 0, variant, tile.B_R, 64)
        lo = gl.minimum(gl.maximum(part.lo, walk.lo), walk.hi)
        hi = gl.maximum(gl.minimum(part.hi, walk.hi), lo)
        hi = gl.where(j0 < keys.N, hi, lo)
        return Visit(visit.h, lo, hi, Walk(lo, part.full_lo, part.full_hi, hi), visit.band)
    else:
        return visit


@gluon.jit
def place_of(visit, keys, shape, variant, B_R: gl.constexpr):
    """Where a visit's query tile is."""
    h, m = visit.h, tile_of(visit, keys, variant)
    return Place(keys.b, h, keys.b * shape.H + h, m * B_R, keys.M, keys.N, keys.N - keys.M)


@gluon.jit
def is_edge(visit):
    """Whether a visit needs the mask."""
    return (visit.x < visit.walk.full_lo) | (visit.x >= visit.walk.full_hi)


@gluon.jit
def next_turn(keys, m, variant, tile: gl.constexpr):
    """The key tile that adds to query tile m after this one: the next before it whose walk comes by, or -1."""
    B_R: gl.constexpr = tile.B_R
    B_C: gl.constexpr = tile.B_C
    t = keys.t
    there = False
    while (t >= 0) & ~there:
        t -= 1
        lo, _, _, hi = query_range(variant, 0, keys.b, t * B_C, keys.M, keys.N, B_R, B_C)
        there = (lo <= m) & (m < hi)
    return t
