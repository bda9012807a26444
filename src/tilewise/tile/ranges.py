"""Find the tiles that a program loops over: an interval of them, or a list where the mask is no interval."""

from typing import NamedTuple

import triton
import triton.language as tl

from .masks import key_tiles, query_tiles, visible
from .rows import rows_of


class TileLists(NamedTuple):
    """Address the lists of tiles for masks that are no intervals. Each (batch, head, tile) has how many are partial and
    full, then which. Strides are 2 n + 3: some are 0, and even then no kernel of its own is compiled."""

    ptr: object
    batch: object
    head: object
    row: object


class Variant(NamedTuple):
    """Hold what makes one attention differ from another: values that the kernels call, and a forward's sink."""

    mask: tuple
    scores: tuple
    dropout: object
    lists: object
    sink: object = None
    codes: object = None
    """Is a `Scales` where Q and K are int8."""


class Scales(NamedTuple):
    """Hold what int8 Q and K lack (quantize/codes.py): descale factors of rows and of blocks, q . mean; blocks of a
    head, as 2 n + 1."""

    q_descale: object
    k_descale: object
    q_shift: object
    q_stride: object
    k_stride: object
    of_values: tuple = ()
    """Holds the codes of V and their descale factors, or nothing where V has 16 bits."""


class Place(NamedTuple):
    """Locate a program's tile: batch entry, head, score matrix b H + h, its first row (or key), lengths, N - M."""

    b: object
    h: object
    matrix: object
    i0: object
    M: object
    N: object
    shift: object


@triton.jit
def list_at(lists, b, h, t):
    """Return the address of the list of tile t."""
    if lists is None:
        return 0
    else:
        batch, head, row = (lists.batch >> 1) - 1, (lists.head >> 1) - 1, (lists.row >> 1) - 1
        return lists.ptr + (b.to(tl.int64) * batch + h.to(tl.int64) * head + t.to(tl.int64) * row)


@triton.jit
def key_range(variant, lists, place, B_R: tl.constexpr, B_C: tl.constexpr):
    """Return positions (lo, full_lo, full_hi, hi) of the key tiles that the rows from i0 on see."""
    if variant.lists is None:
        last = tl.minimum(place.i0 + B_R, place.M) - 1
        first = place.i0 + place.shift
        return key_tiles(variant.mask, place.b, first, last + place.shift, place.N, B_C)
    else:
        return list_range(lists)


@triton.jit
def query_range(variant, lists, b, j0, M, N, B_R: tl.constexpr, B_C: tl.constexpr):
    """Return positions of the query tiles that see the keys from j0 on."""
    if variant.lists is None:
        return query_tiles(variant.mask, b, j0, tl.minimum(j0 + B_C, N) - 1, M, N - M, B_R)
    else:
        return list_range(lists)


@triton.jit
def list_range(at):
    """Return positions in a list, which holds its partial tiles first, then the full ones."""
    partial = tl.load(at)
    end = partial + tl.load(at + 1)
    return 0, partial, end, end


@triton.jit
def tile_at(lists, at, x):
    """Return the tile at position x."""
    if lists is None:
        return x
    else:
        return tl.load(at + 2 + x)


@triton.jit
def partial_at(lists, at, x, lo, full_lo, full_hi):
    """Return the x-th tile outside [full_lo, full_hi)."""
    return tile_at(lists, at, lo + x + tl.where(lo + x >= full_lo, full_hi - full_lo, 0))


@triton.jit(do_not_specialize=["lists", "kinds", "mask", "packed", "M", "N", "heads", "tiles", "across"])
def attention_list_tiles(
    lists, kinds, mask, packed, M, N, heads, tiles, across, B_R: tl.constexpr, B_C: tl.constexpr, BY_KEY: tl.constexpr
):
    """Write the list of one query tile (its key tiles), or BY_KEY of one key tile (its query tiles).

    `kinds` is scratch, a byte a tile: 1 for a partial one, 2 for a full one. Tiles that the mask's intervals hide are
    not looked at.
    """
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % heads, program // tiles // heads
    _, M, _, N = rows_of(packed, b, M, N)
    at = list_at(lists, b, h, t)
    own = kinds + program.to(tl.int64) * across
    ROWS: tl.constexpr = min(B_R, 16)  # of a tile at a time, or registers would spill
    if BY_KEY:
        lo, _, _, hi = query_tiles(mask, b, t * B_C, tl.minimum(t * B_C + B_C, N) - 1, M, N - M, B_R)
    else:
        lo, _, _, hi = key_tiles(mask, b, t * B_R + N - M, tl.minimum(t * B_R + B_R, M) - 1 + N - M, N, B_C)
    partial = 0
    for x in range(lo, hi):
        r, c = t, x
        if BY_KEY:
            r, c = x, t
        shown = tl.zeros([ROWS, B_C], tl.int32)
        for row in range(0, B_R, ROWS):
            i = r * B_R + row + tl.arange(0, ROWS)[:, None]
            j = c * B_C + tl.arange(0, B_C)[None, :]
            shown += (visible(mask, b, h, i + (N - M), j) & (i < M) & (j < N)).to(tl.int32)
        count = tl.sum(tl.sum(shown, 1), 0)
        # a tile that sticks out is never full: its loads need bounds
        full = (count == B_R * B_C).to(tl.int32)
        tl.store(own + x, (count > 0).to(tl.int32) + full)
        partial += (count > 0).to(tl.int32) - full
    tl.debug_barrier()
    first, full = 0, 0
    for start in range(lo, hi, 128):
        some = start + tl.arange(0, 128)
        kind = tl.load(own + some, mask=some < hi, other=0)
        ones, twos = (kind == 1).to(tl.int32), (kind == 2).to(tl.int32)
        tl.store(at + 1 + first + tl.cumsum(ones, 0), some, mask=kind == 1)
        tl.store(at + 1 + partial + full + tl.cumsum(twos, 0), some, mask=kind == 2)
        first += tl.sum(ones, 0)
        full += tl.sum(twos, 0)
    tl.store(at, partial)
    tl.store(at + 1, full)
