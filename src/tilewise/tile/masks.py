"""Compute masks on the device, as values/masks.py describes them. Each mask is three functions.

    keep(b, h, i, j, *captured)     tells whether row i sees key j, elementwise
    keys(b, i, *captured)           returns the interval [lo, hi) of keys that row i sees
    queries(b, j, *captured)        returns the interval of rows that see key j

Neither bound of `keys` and `queries` decreases as i or j grows, so a tile's first and last row bound it. A mask that is
no interval has `everywhere` for both. Then `keep` decides, in every tile, and a list gives the tiles to loop over.
"""

from typing import NamedTuple

import triton
import triton.language as tl

OPEN = tl.constexpr(1 << 30)


class Part(NamedTuple):
    """Hold one mask: its device functions and what they captured."""

    keep: tl.constexpr
    keys: tl.constexpr
    queries: tl.constexpr
    captured: tuple


@triton.jit
def everywhere(b, i):
    """Return all keys (or rows): the mask is no interval."""
    return -OPEN, OPEN


@triton.jit
def visible(mask, b, h, i, j):
    """Return whether every part of the mask shows key j to row i; i and j broadcast together."""
    if len(mask) == 0:
        return (i >= -OPEN) & (j >= 0)
    else:
        seen = mask[0].keep(b, h, i, j, *mask[0].captured)
        for p in tl.static_range(1, len(mask)):
            seen = seen & mask[p].keep(b, h, i, j, *mask[p].captured)
        return seen


@triton.jit
def key_range_of(mask, b, i, N):
    """Return the keys [lo, hi) that the mask's intervals show to row i (or each of rows i)."""
    lo, hi = 0, N
    for p in tl.static_range(len(mask)):
        if mask[p].keys is not everywhere:
            part_lo, part_hi = mask[p].keys(b, i, *mask[p].captured)
            lo, hi = tl.maximum(lo, part_lo), tl.minimum(hi, part_hi)
    return lo, hi


@triton.jit
def query_range_of(mask, b, j, M, shift):
    """Return the rows [lo, hi) of 0..M to which the mask's intervals show key j (or each of keys j). `shift` = N - M
    brings rows back."""
    lo, hi = 0, M
    for p in tl.static_range(len(mask)):
        if mask[p].queries is not everywhere:
            part_lo, part_hi = mask[p].queries(b, j, *mask[p].captured)
            lo, hi = tl.maximum(lo, part_lo - shift), tl.minimum(hi, part_hi - shift)
    return lo, hi


@triton.jit
def key_tiles(mask, b, first, last, N, B_C: tl.constexpr):
    """Return the key tiles that rows first..last see: (lo, full_lo, full_hi, hi). Between the middle two nothing is
    masked: no tile lies there if a part of the mask is no interval."""
    lo, full_hi = key_range_of(mask, b, first, N)
    full_lo, hi = key_range_of(mask, b, last, N)
    for p in tl.static_range(len(mask)):
        if mask[p].keys is everywhere:
            full_hi = full_lo
    return to_tiles(lo, hi, full_lo, full_hi, B_C)


@triton.jit
def query_tiles(mask, b, first, last, M, shift, B_R: tl.constexpr):
    """Return the query tiles that see any of the keys first..last, the same way."""
    lo, full_hi = query_range_of(mask, b, first, M, shift)
    full_lo, hi = query_range_of(mask, b, last, M, shift)
    return to_tiles(lo, hi, full_lo, full_hi, B_R)


@triton.jit
def to_tiles(lo, hi, full_lo, full_hi, SIZE: tl.constexpr):
    """Return the tiles that touch [lo, hi), and among them those inside [full_lo, full_hi)."""
    first = lo // SIZE
    end = tl.where(hi > lo, tl.cdiv(hi, SIZE), first)
    full = tl.minimum(tl.maximum(tl.cdiv(full_lo, SIZE), first), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_hi, 0) // SIZE, full), end)
    return first, full, full_end, end


@triton.jit
def spans_keep(b, h, i, j, lo, hi, M, N):
    """Return lo <= j < hi of the row."""
    first, end = spans_keys(b, i, lo, hi, M, N)
    return (j >= first) & (j < end)


@triton.jit
def spans_keys(b, i, lo, hi, M, N):
    """Return the row's interval; rows past the ends have those of the last."""
    at = b.to(tl.int64) * M + tl.minimum(tl.maximum(i - (N - M), 0), M - 1)
    return tl.load(lo + at).to(tl.int32), tl.load(hi + at).to(tl.int32)


@triton.jit
def spans_queries(b, j, lo, hi, M, N):
    """Return the rows from the first that ends behind j, to the first that begins behind it."""
    row = b.to(tl.int64) * M
    return first_above(hi + row, j, M) + (N - M), first_above(lo + row, j, M) + (N - M)


@triton.jit
def first_above(x, j, M):
    """Return the first of M numbers, which never decrease, that is above j; M if none is. It halves an interval."""
    low = j * 0
    high = low + M
    for _ in range(31):
        middle = (low + high) // 2
        above = tl.load(x + middle, mask=low < high, other=0) > j
        low, high = tl.where((low < high) & (above == 0), middle + 1, low), tl.where(above, middle, high)
    return low
