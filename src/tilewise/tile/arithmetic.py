"""Compute with numbers as Python and PyTorch do, for device functions that are made from programs (host/emit.py)."""

import triton
import triton.language as tl


@triton.jit
def floor_divide(a, b):
    """Return a / b, rounded down."""
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r ^ b) < 0), q - 1, q)


@triton.jit
def floor_remainder(a, b):
    """Return what a / b, rounded down, leaves."""
    r = a % b
    return tl.where((r != 0) & ((r ^ b) < 0), r + b, r)


@triton.jit
def power(x, y):
    """Return x^y, also where x is negative and y whole."""
    x, y = tl.cast(x, tl.float32), tl.cast(y, tl.float32)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    half = y * 0.5
    signed = tl.where(tl.floor(half) == half, size, tl.where(tl.floor(y) == y, -size, float("nan")))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0.0, signed, size))


@triton.jit
def tanh(x):
    """Compute tanh to 2 units in the last place: the exponential form cancels near 0, a series takes over there."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2 |x|)
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = 1.0 + x2 * (
        -0.3333333333 + x2 * (0.1333333333 + x2 * (-0.0539682540 + x2 * (0.0218694885 - x2 * 0.0088632355)))
    )
    return tl.where(x2 < 0.0625, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def inside(at, size):
    """Return 0 <= at < size."""
    if at.dtype.primitive_bitwidth == 64:
        return (at >= 0) & (at < size)
    else:
        return tl.cast(at, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def whole(x):
    """Return a number of at least 32 bits."""
    if x.dtype.primitive_bitwidth == 64:
        return x
    else:
        return x.to(tl.int32)
