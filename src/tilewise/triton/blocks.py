"""Loading and storing blocks of rows, and walking the tiles that a mask leaves."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..tile.masks import key_tiles, query_tiles, visible


class Visits(NamedTuple):
    """Lists of tiles for masks that are no intervals: per (batch, head, tile) how many partial and full, then which."""

    ptr: object
    batch: object
    head: object
    row: object


@triton.jit
def offsets(X, B: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Where the entries of B consecutive rows lie from the first; 64-bit.  # (B, BLOCK)"""
    return tl.arange(0, B).to(tl.int64)[:, None] * X.row + tl.arange(0, BLOCK)[None, :] * X.entry


@triton.jit
def load_rows(start, X, at, first, length, D: tl.constexpr, CHECK: tl.constexpr):
    """Rows first.. of an operand, zero past `length` (if CHECK) and past size D.  # (B, BLOCK)"""
    ptr = start + tl.cast(first, tl.int64) * X.row + at
    B: tl.constexpr = at.shape[0]
    BLOCK: tl.constexpr = at.shape[1]
    if CHECK:
        inside = (first + tl.arange(0, B) < length)[:, None]
        if BLOCK != D:
            inside = inside & (tl.arange(0, BLOCK) < D)[None, :]
        return tl.load(ptr, mask=inside, other=0.0)
    elif BLOCK != D:
        return tl.load(ptr, mask=(tl.arange(0, BLOCK) < D)[None, :], other=0.0)
    else:
        return tl.load(ptr)


@triton.jit
def store_rows(start, X, at, first, length, x, D: tl.constexpr):
    """Writes the rows below `length` and the entries below D."""
    B: tl.constexpr = at.shape[0]
    BLOCK: tl.constexpr = at.shape[1]
    inside = (first + tl.arange(0, B) < length)[:, None] & (tl.arange(0, BLOCK) < D)[None, :]
    tl.store(start + tl.cast(first, tl.int64) * X.row + at, x.to(X.ptr.dtype.element_ty), mask=inside)


@triton.jit
def list_at(visits, b, h, t):
    """Address of the list of tile t."""
    if visits is None:
        return 0
    else:
        return visits.ptr + (b.to(tl.int64) * visits.batch + h.to(tl.int64) * visits.head + t.to(tl.int64) * visits.row)


@triton.jit
def key_range(visits, at, mask, b, first, last, N, B_C: tl.constexpr):
    """Positions (lo, full_lo, full_hi, hi) of the key tiles that rows first..last visit."""
    if visits is None:
        return key_tiles(mask, b, first, last, N, B_C)
    else:
        return list_range(at)


@triton.jit
def query_range(visits, at, mask, b, first, last, M, shift, B_R: tl.constexpr):
    """Positions of the query tiles that visit keys first..last."""
    if visits is None:
        return query_tiles(mask, b, first, last, M, shift, B_R)
    else:
        return list_range(at)


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


@triton.jit(do_not_specialize=["mask", "M", "N", "heads", "tiles", "across"])
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
