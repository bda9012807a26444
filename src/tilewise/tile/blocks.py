"""Load and store blocks of rows, and multiply on the units that PRECISION names."""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import origin

INNER = tl.constexpr(16)
"""Is the least inner dimension that tl.dot takes."""


class Tile(NamedTuple):
    """Hold the constants of a kernel: G query heads share a key head; head sizes; rows and columns of a tile of S; how
    products are computed."""

    G: int
    d: int
    d_v: int
    B_R: int
    B_C: int
    PRECISION: str


class Block(NamedTuple):
    """Describe a block of rows that moves along an operand. It has its first address, its rows' offsets, which entries
    exist, and which do in each slice of them."""

    start: object
    at: object
    row: object
    exists: object
    slices: tuple


@triton.constexpr_function
def width(dtype, d):
    """Return the columns of a block for a head size: a power of two. In fp32, or where a row needs padding at all,
    return at least 64: narrower ones give wrong products (docs/internals/adr/0004)."""
    least = max(INNER.value, triton.next_power_of_2(d))
    return least if dtype != tl.float32 and d == least else max(64, least)


@triton.jit
def block(X, b, h, first, B: tl.constexpr, d: tl.constexpr):
    """Describe B rows of head h from row `first` on; offsets are 64-bit, and rows padded to their width. # (B,
    BLOCK)"""
    BLOCK: tl.constexpr = width(X.ptr.dtype.element_ty, d)
    entries = tl.arange(0, BLOCK)
    at = tl.arange(0, B).to(tl.int64)[:, None] * X.row + entries[None, :]
    exists = tl.full([1, BLOCK], 1, tl.int1)  # a constant: the mask folds away
    if d < BLOCK:
        exists = (entries < d)[None, :]
    # with narrower slices there is less to load than there are threads, and the compiler keeps them all in registers
    WIDTH: tl.constexpr = max(INNER, BLOCK // 8)
    slices = ()
    for start in tl.static_range(0, d, WIDTH):
        slice = tl.full([1, WIDTH], 1, tl.int1)
        if d < start + WIDTH:
            slice = (start + tl.arange(0, WIDTH) < d)[None, :]
        slices += (slice,)
    return Block(origin(X, b, h, first), at, X.row, exists, slices)


@triton.jit
def load_rows(X, first, length, CHECK: tl.constexpr):
    """Load rows first.. of a block, zero past `length` (if CHECK) and past the head size. # (B, BLOCK)"""
    ptr = X.start + tl.cast(first, tl.int64) * X.row + X.at
    inside = X.exists
    if CHECK:
        inside = inside & (first + tl.arange(0, X.at.shape[0]) < length)[:, None]
    return tl.load(ptr, mask=inside, other=0.0)


@triton.jit
def load_row_values(start, i0, B: tl.constexpr, M, other, CHECK: tl.constexpr):
    """Load one number for each of B rows. # (B,)"""
    rows = i0 + tl.arange(0, B)
    if CHECK:
        return tl.load(start + rows, mask=rows < M, other=other)
    else:
        return tl.load(start + rows)


@triton.jit
def store_rows(X, first, length, x):
    """Store the rows below `length` and the entries that exist."""
    inside = X.exists & (first + tl.arange(0, X.at.shape[0]) < length)[:, None]
    tl.store(X.start + tl.cast(first, tl.int64) * X.row + X.at, x.to(X.start.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a b, in fp32. "tf32" rounds its operands first: the matrix unit would cut them off."""
    if PRECISION == "tf32":
        return tl.dot(round_to_tf32(a), round_to_tf32(b), input_precision=PRECISION)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def round_to_tf32(x):
    """Round to 10 bits of mantissa, half away from zero; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)  # noqa: PLR0124, NaN
