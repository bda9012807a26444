"""Load the factors of a product: whole for the matrix units, in slices of the inner dimension for the FMA units.

The compiler keeps in registers what a thread needs of both factors for the whole inner dimension. So FMA units get a
slice of it at a time. A factor is a tuple of such slices, or of one whole tile.

For FMA units, the order of a right factor in shared memory matters: they read four columns of it at a time. Where rows
are stored as rows, its columns lie in the same banks, and every read is an eight-way bank conflict. So `load_right`
joins pairs of neighbouring rows, and the compiler stores columns next to each other. It does so as long as a thread has
two pairs or more: with larger groups, each thread of many warps would have only one.

Of two factors one is stationary, loaded once for a whole loop, and one is streamed, loaded in each iteration.
"""

import triton
import triton.language as tl

from .blocks import INNER, dot, load_rows


@triton.constexpr_function
def on_fma_units(dtype, PRECISION):
    """Return whether products of this type leave the matrix units alone."""
    return dtype == tl.float32 and PRECISION == "ieee"


@triton.jit
def load_left(X, first, length, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """Load rows as the left factor of a sum over entries. # slices (B, WIDTH)"""
    if on_fma_units(X.start.dtype.element_ty, PRECISION):
        slices = ()
        rows = first + tl.arange(0, X.at.shape[0])
        for x in tl.static_range(len(X.slices)):
            slices += (load_some(X, rows, length, x * X.slices[x].shape[1], X.slices[x], CHECK),)
        return slices
    else:
        return (load_rows(X, first, length, CHECK),)


@triton.jit
def load_right(X, first, length, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """Load rows as columns of the right factor of a sum over entries. # slices (WIDTH, B)"""
    if on_fma_units(X.start.dtype.element_ty, PRECISION):
        slices = ()
        for x in tl.static_range(len(X.slices)):
            slices += (load_columns(X, first, length, x * X.slices[x].shape[1], X.slices[x], CHECK),)
        return slices
    else:
        return (load_rows(X, first, length, CHECK).T,)


@triton.jit
def load_values(X, first, length, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """Load rows as the right factor of a sum over rows: of n slices, the x-th has rows x, x + n, … # slices (B / n,
    BLOCK)"""
    if on_fma_units(X.start.dtype.element_ty, PRECISION):
        B: tl.constexpr = X.at.shape[0]
        COUNT: tl.constexpr = min(4, B // INNER)
        slices = ()
        for x in tl.static_range(COUNT):
            rows = first + x + COUNT * tl.arange(0, B // COUNT)
            slices += (load_some(X, rows, length, 0, X.exists, CHECK),)
        return slices
    else:
        return (load_rows(X, first, length, CHECK),)


@triton.jit
def left_slices(P, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return what multiplies the slices of `load_values`: a thread has four adjacent columns of P, one for each slice.

    Made before other products are, they wait for theirs in shared memory rather than in registers.
    """
    if on_fma_units(dtype, PRECISION):
        R: tl.constexpr = P.shape[0]
        C: tl.constexpr = P.shape[1]
        if C >= 4 * INNER:
            even, odd = tl.split(tl.reshape(P, (R, C // 4, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            return first, second, third, fourth
        elif C >= 2 * INNER:
            return tl.split(tl.reshape(P, (R, C // 2, 2)))
        else:
            return (P,)
    else:
        return (P,)


@triton.jit
def load_some(X, rows, length, start: tl.constexpr, exists, CHECK: tl.constexpr):
    """Load entries from `start` on of some rows, zero past `length` (if CHECK) and where they do not exist."""
    inside = exists
    if CHECK:
        inside = inside & (rows < length)[:, None]
    entries = start + tl.arange(0, exists.shape[1])
    return tl.load(X.start + rows.to(tl.int64)[:, None] * X.row + entries[None, :], mask=inside, other=0.0)


@triton.jit
def load_columns(X, first, length, start: tl.constexpr, exists, CHECK: tl.constexpr):
    """Load the same of a whole block, transposed, with pairs of rows next to each other. # (entries, B)"""
    rows = first + 2 * tl.arange(0, X.at.shape[0] // 2)
    even, odd = load_some(X, rows, length, start, exists, CHECK), load_some(X, rows + 1, length, start, exists, CHECK)
    columns = tl.permute(tl.join(even, odd), (1, 0, 2))  # (entries, B / 2, 2)
    return tl.reshape(columns, (exists.shape[1], X.at.shape[0]))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return the product of two factors, in fp32."""
    sums = dot(a[0], b[0], PRECISION)
    for x in tl.static_range(1, len(a)):  # no slices but on FMA units
        sums = tl.dot(a[x], b[x], sums, input_precision="ieee")
    return sums


@triton.constexpr_function
def stationary_axis(dtype, PRECISION):
    """Return the axis of S along which the stationary tile lies. Matrix units take it from the left. FMA units take it
    from the right, where transposing is expensive, so that it is done once."""
    return 1 if on_fma_units(dtype, PRECISION) else 0


@triton.jit
def load_stationary(X, first, length, PRECISION: tl.constexpr):
    """Load the stationary tile."""
    if stationary_axis(X.start.dtype.element_ty, PRECISION):
        return load_right(X, first, length, True, PRECISION)
    else:
        return load_left(X, first, length, True, PRECISION)


@triton.jit
def load_streamed(X, first, length, CHECK: tl.constexpr, PRECISION: tl.constexpr):
    """Load a tile of the loop."""
    if stationary_axis(X.start.dtype.element_ty, PRECISION):
        return load_left(X, first, length, CHECK, PRECISION)
    else:
        return load_right(X, first, length, CHECK, PRECISION)


@triton.jit
def tile_product(stationary, streamed, PRECISION: tl.constexpr):
    """Return the products of the rows of both tiles, S in the axes of `stationary_axis`."""
    if stationary_axis(stationary[0].dtype, PRECISION):
        return product(streamed, stationary, PRECISION)
    else:
        return product(stationary, streamed, PRECISION)
