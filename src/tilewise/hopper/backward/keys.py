"""Find a key tile, and the query tiles that see it.

A program loops over these. A `Walk` is the range of that loop for one query head, a `Visit` one iteration of it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.rows import rows_of
from ...tile.schedule import assign
from ...tile.visits import Place, list_at, query_range, tile_at
from ..parts.row_blocks import first_block


class Keys(NamedTuple):
    """Locate the key tile of a program."""

    b: object
    h: object
    """Is the first query head of the loop."""
    h_k: object
    t: object
    j0: object
    q0: object
    k0: object
    M: object
    N: object
    step: object
    """Is 1 if loops go from a head's first query tile to its last, -1 if they come down."""


class Walk(NamedTuple):
    """Hold the loop over the query tiles that see a key tile: positions lo up to hi, of which [full_lo, full_hi) need
    no mask."""

    lo: object
    full_lo: object
    full_hi: object
    hi: object


class Visit(NamedTuple):
    """Hold one iteration over a query tile: a position in the loop of one of the query heads that share the key
    tile."""

    h: object
    x: object
    walk: object


@gluon.jit
def keys_of(t, shape, packed, tile: gl.constexpr):
    """Locate tile t of all. The first keys, seen by the most queries, come first. With deterministic dQ the last come
    first, since they have to add first: so no program waits for a tile that has not begun."""
    B_C: gl.constexpr = tile.B_C
    SHARES: gl.constexpr = tile.SHARES
    walk, t_k = assign(t, shape.tiles, shape.heads, shape.section)
    if tile.TURN == 0:
        t_k = shape.tiles - 1 - t_k
    walks = shape.H // tile.GROUP
    b, w = walk // walks, walk % walks
    q0, M, k0, N = rows_of(packed, b, shape.M, shape.N)
    return Keys(b, w * tile.GROUP, w // SHARES, t_k, t_k * B_C, q0, k0, M, N, step_of(t, shape, tile))


@gluon.jit
def step_of(t, shape, tile: gl.constexpr):
    """Return the direction of the loops through tile t. It is up, or where query heads share keys, down in one section
    and up in the next. So with a causal mask the loops of a section begin or end together, and what they read stays in
    the cache. Where adds to dQ are ordered, loops go up; at head size 256, down is slower."""
    if tile.GROUP > 1 and tile.TURN == 0 and tile.D < 256:
        return gl.where(t // (shape.section * shape.tiles) % 2 == 0, -1, 1)
    else:
        return 1


@gluon.jit
def block_of(keys, shape, packed, tile: gl.constexpr):
    """Return a key tile's number among all in memory, where every sequence begins with a new tile."""
    heads = shape.H // (tile.GROUP * tile.SHARES)
    return first_block(packed, keys.b, keys.h_k, heads, keys.k0, shape.key_tiles, tile.B_C) + keys.t


@gluon.jit
def first_visit(keys, variant, tile: gl.constexpr):
    """Return the first iteration of these keys. Query heads that share them come one after the other."""
    walk = walk_over(keys, keys.j0, list_at(variant.visits, keys.b, keys.h, keys.t), variant, tile.B_R, tile.B_C)
    return skip_empty(Visit(keys.h, start_of(walk, keys), walk), keys, variant, tile)


@gluon.jit
def start_of(walk, keys):
    """Return where a head's iterations begin."""
    return gl.where(keys.step > 0, walk.lo, walk.hi - 1)


@gluon.jit
def next_visit(visit, keys, variant, tile: gl.constexpr):
    """Return the next iteration; past the last, return one that does not exist (see `there`)."""
    return skip_empty(Visit(visit.h, visit.x + keys.step, visit.walk), keys, variant, tile)


@gluon.jit
def skip_empty(visit, keys, variant, tile: gl.constexpr):
    """Return this iteration if it exists, else the first of the next head that has one; if there is none, one that does
    not exist. With a plain count of heads in place of the modulo, ptxas arranges the loops of the products worse."""
    if tile.GROUP > 1:
        more = True
        while ~within(visit, visit.walk) & more:
            h = keys.h + (visit.h - keys.h + 1) % tile.GROUP
            more = h != keys.h
            walk = visit.walk
            if variant.visits is not None:
                lists = list_at(variant.visits, keys.b, h, keys.t)
                walk = walk_over(keys, keys.j0, lists, variant, tile.B_R, tile.B_C)
            visit = Visit(h, gl.where(more, start_of(walk, keys), walk.hi), walk)
    return visit


@gluon.jit
def there(visit):
    """Return whether an iteration exists."""
    return visit.x < visit.walk.hi


@gluon.jit
def tile_of(visit, keys, variant):
    """Return an iteration's query tile."""
    return tile_at(variant.visits, list_at(variant.visits, keys.b, visit.h, keys.t), visit.x)


@gluon.jit
def query_block(visit, keys, shape, packed, variant, tile: gl.constexpr):
    """Return that tile's number among all in memory, where every sequence begins with a new tile."""
    first = first_block(packed, keys.b, visit.h, shape.H, keys.q0, shape.blocks, tile.B_R)
    return first + tile_of(visit, keys, variant)


@gluon.jit
def walk_over(keys, j0, lists, variant, B_R: gl.constexpr, COUNT: gl.constexpr):
    """Return the loop over the query tiles that see COUNT keys from j0 on. Keys that stick out past the last are masked
    everywhere."""
    lo, full_lo, full_hi, hi = query_range(variant, lists, keys.b, j0, keys.M, keys.N, B_R, COUNT)
    return Walk(lo, full_lo, gl.where(j0 + COUNT > keys.N, full_lo, full_hi), hi)


@gluon.jit
def part_of(walk, keys, j0, variant, tile: gl.constexpr):
    """Return the part of a loop that the 64 keys from j0 on see, if tiles have PARTS; else all of it."""
    if tile.PARTS:
        part = walk_over(keys, j0, 0, variant, tile.B_R, 64)
        lo = gl.minimum(gl.maximum(part.lo, walk.lo), walk.hi)
        hi = gl.maximum(gl.minimum(part.hi, walk.hi), lo)
        hi = gl.where(j0 < keys.N, hi, lo)
        return Walk(lo, part.full_lo, part.full_hi, hi)
    else:
        return walk


@gluon.jit
def part_at(visit, part, tile: gl.constexpr):
    """Return a part of a loop, if tiles have PARTS; else all of it, which differs from head to head where tiles are
    listed."""
    return part if tile.PARTS else visit.walk


@gluon.jit
def within(visit, part):
    """Return whether an iteration is in a part of its loop."""
    return (visit.x >= part.lo) & (visit.x < part.hi)


@gluon.jit
def place_of(visit, keys, shape, variant, B_R: gl.constexpr):
    """Return where an iteration's query tile is."""
    h, m = visit.h, tile_of(visit, keys, variant)
    return Place(keys.b, h, keys.b * shape.H + h, m * B_R, keys.M, keys.N, keys.N - keys.M)


@gluon.jit
def is_edge(visit, part):
    """Return whether an iteration needs the mask, in a part of its loop."""
    return (visit.x < part.full_lo) | (visit.x >= part.full_hi)
