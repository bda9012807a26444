"""Round numbers to 8 bits; rotate rows by Hadamard's matrix before."""

import triton
import triton.language as tl

from .rows import INF, INTERPRETED, store_tile

INF_BITS = tl.constexpr(0x7F800000)
LEAST = tl.constexpr(2.0**-100)
MOST_OF_V = tl.constexpr(126)
E4M3_NAN = tl.constexpr(127)


@triton.jit
def finite(x):
    """Return x, with 0 for what is not finite."""
    return tl.where(tl.abs(x) < INF, x, 0.0)


@triton.jit
def power(n):
    """Return 2^n for n from -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halved(x):  # (R, C)
    """Sum over rows, halves at a time. # (C,)"""
    C: tl.constexpr = x.shape[1]
    for step in tl.static_range(4):
        first, second = tl.split(tl.permute(tl.reshape(x, (2, 8 >> step, C)), (1, 2, 0)))
        x = first + second
    return tl.reshape(x, (C,))


@triton.jit
def signs_of(SIZE: tl.constexpr):
    """Return the fixed signs of columns. # (SIZE,)"""
    return 1.0 - 2.0 * ((tl.arange(0, SIZE) * 40503 + 12345) >> 8 & 1).to(tl.float32)


@triton.jit
def rotated(x, STEPS: tl.constexpr):  # (R, 2^STEPS)
    """Multiply rows by Hadamard's matrix, by butterflies; return both halves of the columns.

    Threads lie along rows, so that one has a row's columns in registers. # (C / 2, R), (C / 2, R)
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    x = tl.trans(x)
    for n in tl.static_range(STEPS - 1):
        a, b = tl.split(tl.permute(tl.reshape(x, (C // (2 << n), 2, 1 << n, R)), (0, 2, 3, 1)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (C, R))
    a, b = tl.split(tl.permute(tl.reshape(x, (2, C // 2, R)), (1, 2, 0)))
    return a + b, a - b


@triton.jit
def largest_bits(left, right):  # (C / 2, R), (C / 2, R)
    """Return the largest `size_bits` of each row. # (R,)"""
    return tl.maximum(tl.max(size_bits(left), 0), tl.max(size_bits(right), 0))


@triton.jit
def store_rows(at, left, right, factor, mask):
    """Store int8 codes of rows, whose halves of columns these are, from `at` on."""
    C: tl.constexpr = 2 * left.shape[0]
    R: tl.constexpr = left.shape[1]
    whole = tl.permute(tl.join(int8(left, factor, mask), int8(right, factor, mask)), (1, 2, 0))
    store_tile(at, tl.reshape(whole, (R, C)), C)


@triton.constexpr_function
def log2_of(size):
    """Return the exponent of a power of two."""
    return size.bit_length() - 1


@triton.jit
def size_bits(x):
    """Return the bits of |x|: integers in the order of the numbers, above which are inf and then NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def int8_scale(top):
    """Return how numbers become int8 codes, and codes numbers, where the largest `size_bits` becomes 127: a factor, a
    mask of the codes' bits, and the descale factor. It is 0 for zeros, and NaN for what is not finite."""
    finite = top < INF_BITS
    top = top.to(tl.float32, bitcast=True)
    exists = finite & (top >= LEAST)
    factor = tl.where(exists, tl.div_rn(127.0, tl.where(exists, top, 1.0)), 0.0)
    descale = tl.div_rn(tl.where(exists, top, 0.0), 127.0)
    return factor, tl.where(finite, 255, 0), tl.where(finite, descale, float("nan"))


@triton.jit
def int8(x, factor, mask):
    """Return int8 codes of numbers: those times the factor, rounded half to even."""
    rounded = x * factor + 12582912.0  # 1.5 * 2^23: the integer is in the last bits
    return (rounded.to(tl.int32, bitcast=True) & mask).to(tl.int8)


@triton.jit
def on_e4m3_grid(x):
    """Round numbers of at most 448 to what e4m3 holds. Triton's interpreter rounds wrongly up to a power of two."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits & 0x7F800000, 121 << 23)  # below 2^-6, e4m3's numbers are as far apart as there
    large = (exponent + (20 << 23)).to(tl.float32, bitcast=True)  # the next number is an eighth of 2^exponent away
    rounded = (tl.abs(x) + large) - large
    return (rounded.to(tl.int32, bitcast=True) | bits & -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x):
    """Round numbers of at most 448 to e4m3, half to even."""
    if INTERPRETED:
        x = on_e4m3_grid(x)
    return x.to(tl.float8e4nv)


@triton.jit
def key_order(BLOCK_K: tl.constexpr):
    """Return which key of a block each column of V's codes holds."""
    at = tl.arange(0, BLOCK_K)
    return (at & ~15) | ((at & 2) << 2) | ((at >> 1) & 6) | (at & 1)


@triton.jit
def largest_finite(x):
    """Return the largest |x| that is finite."""
    return tl.max(tl.where(tl.abs(x) < INF, tl.abs(x), 0.0))
