"""Loading and storing blocks of rows, and walking the tiles that a mask leaves."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..tile.masks import key_tiles, query_tiles, visible
from ..tile.rows import origin


class Visits(NamedTuple):
    """Lists of tiles for masks that are no intervals: per (batch, head, tile) how many partial and full, then which."""

    ptr: object
    batch: object
    head: object
    row: object


class Variant(NamedTuple):
    """What makes one attention differ from another: values that the kernels call."""

    mask: tuple
    scores: tuple
    dropout: object
    visits: object


class Block(NamedTuple):
    """A block of rows that walks along an operand: its first address, its rows' offsets and which entries exist."""

    start: object
    at: object
    row: object
    exists: object


class Place(NamedTuple):
    """Which tile a program owns: batch entry, head, score matrix b H + h, its first row (or key), lengths, N - M."""

    b: object
    h: object
    matrix: object
    i0: object
    M: object
    N: object
    shift: object


@triton.jit
def block(X, b, h, first, B: tl.constexpr, d: tl.constexpr):
    """B rows of head h from row `first` on; 64-bit offsets, padded to a power of two.  # (B, BLOCK)"""
    # with narrower blocks of fp32, or of rows that need padding, wgmma reads past shared memory (docs/adr/0004)
    NARROW: tl.constexpr = X.ptr.dtype.element_ty != tl.float32 and d == triton.next_power_of_2(d)
    BLOCK: tl.constexpr = max(16 if NARROW else 64, triton.next_power_of_2(d))
    entries = tl.arange(0, BLOCK)
    at = tl.arange(0, B).to(tl.int64)[:, None] * X.row + entries[None, :]
    exists = tl.full([1, BLOCK], 1, tl.int1)  # a constant: the mask folds away
    if d < BLOCK:
        exists = (entries < d)[None, :]
    return Block(origin(X, b, h, first), at, X.row, exists)


@triton.jit
def load_rows(X, first, length, CHECK: tl.constexpr):
    """Rows first.. of a block, zero past `length` (if CHECK) and past the head size.  # (B, BLOCK)"""
    ptr = X.start + tl.cast(first, tl.int64) * X.row + X.at
    inside = X.exists
    if CHECK:
        inside = inside & (first + tl.arange(0, X.at.shape[0]) < length)[:, None]
    return tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def store_rows(X, first, length, x):
    """Writes the rows below `length` and the entries that exist."""
    inside = X.exists & (first + tl.arange(0, X.at.shape[0]) < length)[:, None]
    tl.store(X.start + tl.cast(first, tl.int64) * X.row + X.at, x.to(X.start.dtype.element_ty), mask=inside)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b, in fp32. "tf32" rounds its operands first: the matrix unit would cut them off."""
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def round_to_tf32(x):
    """To 10 bits of mantissa, half away from zero; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)  # noqa: PLR0124, NaN


@triton.jit
def list_at(visits, b, h, t):
    """Address of the list of tile t."""
    if visits is None:
        return 0
    else:
        return visits.ptr + (b.to(tl.int64) * visits.batch + h.to(tl.int64) * visits.head + t.to(tl.int64) * visits.row)


@triton.jit
def key_range(variant, lists, place, B_R: tl.constexpr, B_C: tl.constexpr):
    """Positions (lo, full_lo, full_hi, hi) of the key tiles that the rows from i0 on visit."""
    if variant.visits is None:
        last = tl.minimum(place.i0 + B_R, place.M) - 1
        first = place.i0 + place.shift
        return key_tiles(variant.mask, place.b, first, last + place.shift, place.N, B_C)
    else:
        return list_range(lists)


@triton.jit
def query_range(variant, lists, b, j0, M, N, B_R: tl.constexpr, B_C: tl.constexpr):
    """Positions of the query tiles that visit the keys from j0 on."""
    if variant.visits is None:
        return query_tiles(variant.mask, b, j0, tl.minimum(j0 + B_C, N) - 1, M, N - M, B_R)
    else:
        return list_range(lists)


@triton.jit
def list_range(at):
    """A list holds its partial tiles first, then the full ones."""
    partial = tl.load(at)
    end = partial + tl.load(at + 1)
    return 0, partial, end, end


@triton.jit
def tile_at(visits, at, x):
    """The tile at position x."""
    if visits is None:
        return x
    else:
        return tl.load(at + 2 + x)


@triton.jit
def partial_at(visits, at, x, lo, full_lo, full_hi):
    """The x-th tile outside [full_lo, full_hi)."""
    return tile_at(visits, at, lo + x + tl.where(lo + x >= full_lo, full_hi - full_lo, 0))


@triton.jit(do_not_specialize=["visits", "mask", "M", "N", "heads", "tiles", "across"])
def list_tiles(visits, mask, M, N, heads, tiles, across, B_R: tl.constexpr, B_C: tl.constexpr, BY_KEY: tl.constexpr):
    """Writes the list of one query tile (its key tiles), or BY_KEY of one key tile (its query tiles)."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % heads, program // tiles // heads
    at = list_at(visits, b, h, t)
    partial, full = 0, 0
    for want_full in tl.static_range(2):
        for x in range(across):
            r, c = t, x
            if BY_KEY:
                r, c = x, t
            i = r * B_R + tl.arange(0, B_R)[:, None]
            j = c * B_C + tl.arange(0, B_C)[None, :]
            inside = (i < M) & (j < N)
            seen = visible(mask, b, h, i + (N - M), j) & inside
            any_seen = tl.max(tl.max(seen.to(tl.int32), 1), 0)
            # a tile that sticks out is never full: its loads need bounds
            all_seen = tl.min(tl.min(seen.to(tl.int32), 1), 0)
            if want_full:
                tl.store(at + 2 + partial + full, x, mask=all_seen == 1)
                full += all_seen
            else:
                tl.store(at + 2 + partial, x, mask=(any_seen == 1) & (all_seen == 0))
                partial += any_seen - all_seen
    tl.store(at, partial)
    tl.store(at + 1, full)
