"""Find a key tile, and the query tiles that see it.

A program loops over these. A `Loop` is the range of that loop for one query head, a `Step` one iteration of it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.ranges import Place, list_at, query_range, tile_at
from ...tile.rows import first_block, rows_of
from ...tile.schedule import assign


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
    direction: object
    """Is 1 if loops go from a head's first query tile to its last, -1 if they come down."""


class Loop(NamedTuple):
    """Hold the loop over the query tiles that see a key tile: positions lo up to hi, of which [full_lo, full_hi) need
    no mask."""

    lo: object
    full_lo: object
    full_hi: object
    hi: object


class Step(NamedTuple):
    """Hold one iteration over a query tile: a position in the loop of one of the query heads that share the key
    tile."""

    h: object
    x: object
    loop: object


@gluon.jit
def keys_of(t, call, tile: gl.constexpr):
    """Locate tile t of all. The first keys, seen by the most queries, come first. With deterministic dQ the last come
    first, since they have to add first: so no program waits for a tile that has not begun."""
    B_C: gl.constexpr = tile.B_C
    GQA_PROGRAMS: gl.constexpr = tile.GQA_PROGRAMS
    loop, t_k = assign(t, call.shape.tiles, call.shape.heads, call.shape.section)
    if tile.SEMAPHORE_TILES == 0:
        t_k = call.shape.tiles - 1 - t_k
    loops = call.shape.H // tile.GROUP
    b, w = loop // loops, loop % loops
    q0, M, k0, N = rows_of(call.packed, b, call.shape.M, call.shape.N)
    return Keys(b, w * tile.GROUP, w // GQA_PROGRAMS, t_k, t_k * B_C, q0, k0, M, N, direction_of(t, call.shape, tile))


@gluon.jit
def direction_of(t, shape, tile: gl.constexpr):
    """Return the direction of the loops through tile t. It is up, or where query heads share keys, down in one section
    and up in the next. So with a causal mask the loops of a section begin or end together, and what they read stays in
    the cache. Where adds to dQ are ordered, loops go up."""
    if tile.GROUP > 1 and tile.SEMAPHORE_TILES == 0:
        return gl.where(t // (shape.section * shape.tiles) % 2 == 0, -1, 1)
    else:
        return 1


@gluon.jit
def block_of(keys, call, tile: gl.constexpr):
    """Return a key tile's number among all in memory, where every sequence begins with a new tile."""
    heads = call.shape.H // (tile.GROUP * tile.GQA_PROGRAMS)
    return first_block(call.packed, keys.b, keys.h_k, heads, keys.k0, call.shape.key_tiles, tile.B_C) + keys.t


@gluon.jit
def first_step(keys, variant, tile: gl.constexpr):
    """Return the first iteration of these keys. Query heads that share them come one after the other."""
    loop = loop_over(keys, keys.j0, list_at(variant.lists, keys.b, keys.h, keys.t), variant, tile.B_R, tile.B_C)
    return skip_empty(Step(keys.h, start_of(loop, keys), loop), keys, variant, tile)


@gluon.jit
def start_of(loop, keys):
    """Return where a head's iterations begin."""
    return gl.where(keys.direction > 0, loop.lo, loop.hi - 1)


@gluon.jit
def next_step(step, keys, variant, tile: gl.constexpr):
    """Return the next iteration; past the last, return one that does not exist (see `exists`)."""
    return skip_empty(Step(step.h, step.x + keys.direction, step.loop), keys, variant, tile)


@gluon.jit
def skip_empty(step, keys, variant, tile: gl.constexpr):
    """Return this iteration if it exists, else the first of the next head that has one; if there is none, one that does
    not exist. With a plain count of heads in place of the modulo, ptxas arranges the loops of the products worse."""
    if tile.GROUP > 1:
        more = True
        while ~within(step, step.loop) & more:
            h = keys.h + (step.h - keys.h + 1) % tile.GROUP
            more = h != keys.h
            loop = step.loop
            if variant.lists is not None:
                lists = list_at(variant.lists, keys.b, h, keys.t)
                loop = loop_over(keys, keys.j0, lists, variant, tile.B_R, tile.B_C)
            step = Step(h, gl.where(more, start_of(loop, keys), loop.hi), loop)
    return step


@gluon.jit
def exists(step):
    """Return whether an iteration exists."""
    return step.x < step.loop.hi


@gluon.jit
def tile_of(step, keys, variant):
    """Return an iteration's query tile."""
    return tile_at(variant.lists, list_at(variant.lists, keys.b, step.h, keys.t), step.x)


@gluon.jit
def query_block(step, keys, call, tile: gl.constexpr):
    """Return that tile's number among all in memory, where every sequence begins with a new tile."""
    first = first_block(call.packed, keys.b, step.h, call.shape.H, keys.q0, call.shape.blocks, tile.B_R)
    return first + tile_of(step, keys, call.variant)


@gluon.jit
def loop_over(keys, j0, lists, variant, B_R: gl.constexpr, COUNT: gl.constexpr):
    """Return the loop over the query tiles that see COUNT keys from j0 on. Keys that stick out past the last are masked
    everywhere."""
    lo, full_lo, full_hi, hi = query_range(variant, lists, keys.b, j0, keys.M, keys.N, B_R, COUNT)
    return Loop(lo, full_lo, gl.where(j0 + COUNT > keys.N, full_lo, full_hi), hi)


@gluon.jit
def part_of(loop, keys, j0, variant, tile: gl.constexpr):
    """Return the part of a loop that the 64 keys from j0 on see, with HALF_LOOPS; else all of it."""
    if tile.HALF_LOOPS:
        part = loop_over(keys, j0, 0, variant, tile.B_R, 64)
        lo = gl.minimum(gl.maximum(part.lo, loop.lo), loop.hi)
        hi = gl.maximum(gl.minimum(part.hi, loop.hi), lo)
        hi = gl.where(j0 < keys.N, hi, lo)
        return Loop(lo, part.full_lo, part.full_hi, hi)
    else:
        return loop


@gluon.jit
def part_at(step, part, tile: gl.constexpr):
    """Return a part of a loop, with HALF_LOOPS; else all of it, which differs from head to head where tiles are
    listed."""
    return part if tile.HALF_LOOPS else step.loop


@gluon.jit
def within(step, part):
    """Return whether an iteration is in a part of its loop."""
    return (step.x >= part.lo) & (step.x < part.hi)


@gluon.jit
def place_of(step, keys, call, B_R: gl.constexpr):
    """Return where an iteration's query tile is."""
    h, m = step.h, tile_of(step, keys, call.variant)
    return Place(keys.b, h, keys.b * call.shape.H + h, m * B_R, keys.M, keys.N, keys.N - keys.M)


@gluon.jit
def is_partial(step, part):
    """Return whether an iteration needs the mask, in a part of its loop."""
    return (step.x < part.full_lo) | (step.x >= part.full_hi)
