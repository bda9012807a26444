"""Where the backward is: a tile of keys, and the query tiles that see it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..tile.rows import rows_of
from ..tile.schedule import assign
from ..tile.visits import Place, list_at, query_range


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
def visits_of(keys, g, variant, tile: gl.constexpr):
    """The g-th of the query heads that share these keys: which it is, where its list of tiles is, if they are listed,
    and the walk through its query tiles."""
    h = keys.h_k * tile.GROUP + g
    lists = list_at(variant.visits, keys.b, h, keys.t)
    return h, lists, walk_over(keys, keys.j0, lists, variant, tile.B_R, tile.B_C)


@gluon.jit
def walk_over(keys, j0, lists, variant, B_R: gl.constexpr, COUNT: gl.constexpr):
    """The query tiles of so many keys from j0 on. Keys that stick out past the last are masked everywhere."""
    lo, full_lo, full_hi, hi = query_range(variant, lists, keys.b, j0, keys.M, keys.N, B_R, COUNT)
    return Walk(lo, full_lo, gl.where(j0 + COUNT > keys.N, full_lo, full_hi), hi)


@gluon.jit
def part_of(walk, keys, j0, variant, tile: gl.constexpr):
    """What the 64 keys from j0 on see of their tile's walk, if that has PARTS, else all of it."""
    if tile.PARTS:
        part = walk_over(keys, j0, 0, variant, tile.B_R, 64)
        lo = gl.minimum(gl.maximum(part.lo, walk.lo), walk.hi)
        hi = gl.maximum(gl.minimum(part.hi, walk.hi), lo)
        return Walk(lo, part.full_lo, part.full_hi, gl.where(j0 < keys.N, hi, lo))
    else:
        return walk


@gluon.jit
def place_of(keys, shape, h, m, B_R: gl.constexpr):
    """Query tile m of head h."""
    return Place(keys.b, h, keys.b * shape.H + h, m * B_R, keys.M, keys.N, keys.N - keys.M)


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
