"""Rows of Q, K and V that are quantized: loaded, with rotary applied, and stored."""

from typing import NamedTuple

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
BLOCK_Q = tl.constexpr(64)
BLOCK_K = tl.constexpr(128)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Inputs(NamedTuple):
    """Hold what is quantized, as Rows; what a Padding shows: keys from starts (B,) up to ends (B,), or None; rotary's
    tables, as rotary/kernel.py's Tables, or None; and the scales (B, H_k) of Q, K and V that are bytes of e4m3, or
    None."""

    Q: object
    K: object
    V: object
    starts: object
    ends: object
    angles: object
    scales: object


class Sizes(NamedTuple):
    """Hold the constants: G query heads share a key head; head sizes; columns of the codes; pairs that rotary rotates,
    and how they lie."""

    G: int
    d: int
    d_v: int
    SIZE: int
    PAIRS: int
    INTERLEAVED: bool


@triton.jit
def load_entries(X, at, rows, inside, d: tl.constexpr, SIZE: tl.constexpr):  # (R,), (R,)
    """Load rows of a head that begins at `at`, zero outside and past the head size. # (R, SIZE)"""
    columns = tl.arange(0, SIZE)
    exists = inside[:, None] & (columns < d)[None, :]
    return tl.load(at + rows.to(tl.int64)[:, None] * X.row + columns[None, :], mask=exists, other=0)


@triton.jit
def load_block(X, at, rows, inside, d: tl.constexpr, SIZE: tl.constexpr):  # (R,), (R,)
    """Load the same in fp32. # (R, SIZE)"""
    return load_entries(X, at, rows, inside, d, SIZE).to(tl.float32)


@triton.jit
def load_with_rotary(X, at, rows, inside, angles, sizes: tl.constexpr):  # (R,), (R,)
    """Load rows of Q or K as load_block does, and apply rotary if there are angles. # (R, SIZE)"""
    x = load_block(X, at, rows, inside, sizes.d, sizes.SIZE)
    if angles is not None:
        x = with_rotary(x, at + rows.to(tl.int64) * X.row, rows, inside, angles, sizes)
    return x


@triton.jit
def with_rotary(x, at, rows, inside, angles, sizes: tl.constexpr):  # (R, SIZE), (R,), (R,), (R,)
    """Rotate rows, at addresses `at`, by the angles of their positions, as rotary does; round to their type.

    Where pairs are not neighbours, each entry's other one is loaded again: another thread has it. # (R, SIZE)
    """
    R: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = sizes.SIZE
    P: tl.constexpr = sizes.PAIRS
    columns = tl.arange(0, SIZE)
    if sizes.INTERLEAVED:
        p = tl.arange(0, SIZE // 2)
        c, s = load_angles(angles, rows, p, inside[:, None] & (p < P)[None, :])
        x_0, x_1 = tl.split(tl.reshape(x, (R, SIZE // 2, 2)))
        y = tl.reshape(tl.join(x_0 * c - x_1 * s, x_1 * c + x_0 * s), (R, SIZE))
    else:
        second = columns >= P
        exists = inside[:, None] & (columns < 2 * P)[None, :]
        c, s = load_angles(angles, rows, tl.where(second, columns - P, columns), exists)
        other = at[:, None] + tl.where(second, columns - P, columns + P)[None, :]
        other = tl.load(other, mask=exists, other=0.0).to(tl.float32)
        y = x * c + tl.where(second[None, :], other, -other) * s
    y = rounded(y, at.dtype.element_ty)
    return y if 2 * P >= sizes.d else tl.where((columns < 2 * P)[None, :], y, x)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round to a 16-bit type, half to even. Triton's interpreter would cut off the bits that bf16 lacks."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
        x = tl.where(tl.abs(x) < INF, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype).to(tl.float32)


@triton.jit
def load_angles(angles, rows, p, exists):  # (R,), (C,), (R, C)
    """Load cosines and sines of rows for pairs p, in fp32. # (R, C), (R, C)"""
    rows = rows.to(tl.int64)[:, None]
    c = tl.load(angles.COS + rows * angles.stride_cos + p[None, :], mask=exists, other=0.0)
    s = tl.load(angles.SIN + rows * angles.stride_sin + p[None, :], mask=exists, other=0.0)
    return c.to(tl.float32), s.to(tl.float32)


@triton.jit
def key_bounds(x, b, N):
    """Return the keys lo <= j < hi of batch entry b that a Padding shows."""
    lo, hi = 0, N
    if x.starts is not None:
        lo = tl.maximum(tl.load(x.starts + b), 0).to(tl.int32)
    if x.ends is not None:
        hi = tl.minimum(tl.load(x.ends + b), N).to(tl.int32)
    return lo, hi


@triton.jit
def store_tile(at, x, stride: tl.constexpr):  # (R, C)
    """Store rows, one every `stride` entries from `at` on."""
    tl.store(at + tl.arange(0, x.shape[0])[:, None] * stride + tl.arange(0, x.shape[1])[None, :], x)


@triton.constexpr_function
def rows_at_once(size):
    """Return how many rows of a block a program quantizes at a time: registers do not hold 128 x 256 entries."""
    return 128 if size <= 128 else 32
