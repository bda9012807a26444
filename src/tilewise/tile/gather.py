"""Compute the gradients of tensors that scores read in a separate kernel, since only it sums over what shares an entry.

An *orbit* is a set of tiles of S, over heads and batch entries too, between which a score reads the same entries: all
tiles of a head for slope[h], a column of them for bias[b, j], a diagonal for table[h, i - j + c], a single one for
bias[h, i, j] or table[h, distance[i, j]], of all batch entries. One program sums an orbit, or a part of it, in
registers. Then it sums over rows and columns that the index does not read.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import block, load_row_values
from .factors import load_left, load_right, product
from .gradients import scores_gradient
from .masks import key_tiles
from .ranges import Place
from .rows import rows_of, scratch_values
from .scores import Entries, apply_scores


class Gather(NamedTuple):
    """Hold how a score reads a tensor (host/emit.py): what the entries that it reads get, and where they lie.

    Constants come last: in a loop Triton 3.6 loses those of a tuple inside, unless one beside it follows.
    """

    captured: tuple
    unit: object
    """Is the score's, as in `scores.Part`."""
    value: tl.constexpr
    offset: tl.constexpr
    """Is None where sums are stored by the entries' own row, column, head and batch entry."""


class Sums(NamedTuple):
    """Address the sums of each part of the work by the strides of parts, batch entries, heads, rows and columns.

    offsets: where sums belong, -1 for nowhere, if they are stored by orbits; else None. The first three strides are
    2 n + 1, as in `Packed`.
    """

    ptr: object
    offsets: object
    part: object
    batch: object
    head: object
    row: object
    column: object


class Orbits(NamedTuple):
    """Count what programs divide among them. Each number is 2 n + 1, as in `Packed`."""

    parts: object
    first: object
    """Is the number of the first orbit; the next is how many a head has here."""
    count: object
    heads: object
    tiles_r: object
    tiles_c: object
    b_each: object
    """Counts batch entries of an orbit; the next one heads."""
    h_each: object
    rows: object
    """Counts rows that are stored; the next one columns."""
    columns: object
    stride: object
    """Counts the row values of a head in scratch."""


class Way(NamedTuple):
    """Say which score reads the tensor, whether rows and columns read entries of their own, and whether these depend on
    i - j alone; whether sums are added to memory; how many rows a block of row values has in packed sequences."""

    SCORE: int
    BY_ROW: bool
    BY_COLUMN: bool
    DIAGONAL: bool
    ADD: bool
    BLOCK: int


@triton.jit
def gather_step(
    acc, q, do, logs, delta, K, V, place, j0, variant, gather, unit, SCORE: tl.constexpr, PRECISION: tl.constexpr
):
    """Add what one tile's entries get. # (B_r, B_c)"""
    B_R: tl.constexpr = acc.shape[0]
    B_C: tl.constexpr = acc.shape[1]
    EXACT: tl.constexpr = q[0].dtype == tl.float32
    k, v = load_right(K, j0, place.N, True, PRECISION), load_right(V, j0, place.N, True, PRECISION)
    S, dP = product(q, k, PRECISION), product(do, v, PRECISION)
    i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    dS = scores_gradient(S, dP, logs, delta, place, variant, unit, i, j0, j, EXACT, True, SCORE + 1)[1]
    return acc + entry_gradients(S, dS, place, i, j0, j, variant, gather, SCORE)


@triton.jit
def entry_gradients(S, dS, place, i, j0, j, variant, gather, SCORE: tl.constexpr):
    """Return what the entry that each entry of S reads gets, from the gradient of the logits after score SCORE."""
    S = apply_scores(variant.scores, S, Entries(place.b, place.h, place.i0 + i + place.shift, 0, j0, j), SCORE)
    at = Entries(place.b, place.h, place.i0 + place.shift, i, j0, j)
    value = gather.value(dS, S, S, gather.unit, at, *gather.captured)
    real = (dS != 0.0) & (place.i0 + i < place.M) & (j0 + j < place.N)
    return tl.where(real, value, 0.0)


@triton.jit
def first_tile(start, tiles_r, tiles_c, way: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr):
    """Return row and column of an orbit's first tile, and how many rows of tiles it has; the next is DOWN by ALONG
    further.

    Of diagonals, first come those that begin in the first row of squares, then those in the first column. A square has
    DOWN by ALONG tiles.
    """
    if way.DIAGONAL:
        left = start - DOWN * tiles_c
        along = tl.minimum(ALONG, tiles_c)
        t_r = tl.where(left < 0, start // tiles_c, DOWN + left // along)
        t_c = tl.where(left < 0, start % tiles_c, left % along)
        return t_r, t_c, tl.minimum(tl.cdiv(tiles_r - t_r, DOWN), tl.cdiv(tiles_c - t_c, ALONG))
    else:
        across = tiles_c if way.BY_COLUMN else 1
        return start // across, start % across, 1 if way.BY_ROW else tiles_r


@triton.jit
def reduced(acc, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr):
    """Return the sums over rows and columns, unless these read entries of their own."""
    if not BY_ROW:
        acc = tl.sum(acc, 0, keep_dims=True)
    if not BY_COLUMN:
        acc = tl.sum(acc, 1, keep_dims=True)
    return acc


@triton.jit
def store_by_index(acc, sums, to, i0, j0, rows, columns):
    """Store sums where rows from i0 on and columns from j0 on index the tensor. Counts are 2 n + 1."""
    i, j = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    to += (i0 + i).to(tl.int64) * sums.row + (j0 + j).to(tl.int64) * sums.column
    inside = (i0 + i < rows >> 1) & (j0 + j < columns >> 1)
    tl.store(sums.ptr + to, acc.to(sums.ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_sums(
    acc, gather, sums, packed, part, b, h, own, t_r, t_c, M, N, orbits, way: tl.constexpr, tile: tl.constexpr
):
    """Sum over rows and columns that the index does not read, and store or add that."""
    acc = reduced(acc, way.BY_ROW, way.BY_COLUMN)
    i0, j0 = t_r * tile.B_R, t_c * tile.B_C
    to = part.to(tl.int64) * (sums.part >> 1)
    to += b.to(tl.int64) * (sums.batch >> 1) + h.to(tl.int64) * (sums.head >> 1)
    if gather.offset is None:
        store_by_index(acc, sums, to, i0, j0, orbits.rows, orbits.columns)
    else:
        i, j = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
        _, m, _, n = rows_of(packed, b, M, N)
        offset, inside = gather.offset(Entries(b, h, i0 + n - m, i, j0, j), *gather.captured)
        inside = inside & (acc != 0.0)
        offset = tl.zeros(acc.shape, tl.int64) + offset
        if way.ADD:
            tl.atomic_add(sums.ptr + offset, acc, mask=inside, sem="relaxed")
        else:
            to += tl.cast(own, tl.int64) * sums.row + i * acc.shape[1] + j
            tl.store(sums.ptr + to, acc)
            tl.store(sums.offsets + to, tl.where(inside, offset, -1))


@triton.jit(do_not_specialize=["sums", "packed", "variant", "gather", "M", "N", "H", "orbits"])
def attention_backward_gather(
    Q, K, V, dO, scratch, sums, packed, variant, gather, unit, M, N, H, orbits,
    way: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Sum one part of an orbit."""
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    SCORE: tl.constexpr = way.SCORE
    BLOCK: tl.constexpr = way.BLOCK
    DOWN: tl.constexpr = max(B_R, B_C) // B_R if way.DIAGONAL else 1
    ALONG: tl.constexpr = max(B_R, B_C) // B_C if way.DIAGONAL else 0
    parts, count, heads, h_each = orbits.parts >> 1, orbits.count >> 1, orbits.heads >> 1, orbits.h_each >> 1
    tiles_r, tiles_c = orbits.tiles_r >> 1, orbits.tiles_c >> 1
    program = tl.program_id(0)
    part, own = program % parts, program // parts % count
    h0, b0 = program // parts // count % heads, program // parts // count // heads
    t_r, t_c, each = first_tile(own + (orbits.first >> 1), tiles_r, tiles_c, way, DOWN, ALONG)
    wide = 1 if way.BY_COLUMN else tiles_c
    steps = (orbits.b_each >> 1) * h_each * each
    some = tl.cdiv(steps, parts)
    acc = tl.zeros([B_R, B_C], tl.float32)
    for x in range(part * some, tl.minimum(part * some + some, steps)):
        h, b = h0 + x // each % h_each, b0 + x // each // h_each
        q0, m, k0, n = rows_of(packed, b, M, N)
        i0, first = (t_r + x % each * DOWN) * B_R, t_c + x % each * ALONG
        place = Place(b, h, b * H + h, i0, m, n, n - m)
        row = i0 + n - m
        lo, _, _, hi = key_tiles(variant.mask, b, row, tl.minimum(row + B_R, n) - 1, n, B_C)
        lo, hi = tl.maximum(lo, first), tl.where(i0 < m, tl.minimum(hi, first + wide), 0)
        if lo < hi:
            q = load_left(block(Q, b, h, q0, B_R, tile.d), i0, m, True, PRECISION)  # (B_r, d)
            do = load_left(block(dO, b, h, q0, B_R, tile.d_v), i0, m, True, PRECISION)  # (B_r, d_v)
            at = scratch_values(packed, b, h, H, q0, orbits.stride >> 1, BLOCK)
            logs = load_row_values(scratch.logs + at, i0, B_R, m, float("inf"), True)[:, None]
            delta = load_row_values(scratch.delta + at, i0, B_R, m, 0.0, True)[:, None]
            keys, values = block(K, b, h // tile.G, k0, B_C, tile.d), block(V, b, h // tile.G, k0, B_C, tile.d_v)
            for c in range(lo, hi):
                acc = gather_step(
                    acc, q, do, logs, delta, keys, values, place, c * B_C, variant, gather, unit, SCORE, PRECISION
                )
    store_sums(acc, gather, sums, packed, part, b0, h0, own, t_r, t_c, M, N, orbits, way, tile)
