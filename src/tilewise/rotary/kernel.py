"""Rotate each pair of dimensions by the angle of its row's position (Su et al. 2021).

A program takes a block of tokens and a block of heads, so that cosines are read once for all of these heads. The heads
of all operands are concatenated along the grid's second axis: one launch rotates q and k. The inverse, which is also
the gradient, is the same kernel with the sines negated.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Heads(NamedTuple):
    """Hold one operand: X, any strides, and Y, where its rotation goes, contiguous (tokens, H, D). H is 2 n + 1."""

    X: Any
    Y: Any
    H: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any
    stride_d: Any


class Tables(NamedTuple):
    """Hold cosines and sines, (positions, P), one column per pair, contiguous along it."""

    COS: Any
    SIN: Any
    stride_cos: Any
    stride_sin: Any


class Places(NamedTuple):
    """Hold what is added to a row's index: OFFSETS (B,) or None; and CU (B + 1,), where packed sequences start, or
    None."""

    OFFSETS: Any
    CU: Any


@triton.jit
def sequence_of(t, CU, B):  # (B_T,)
    """Find the packed sequence that token t lies in: the last b < B with CU[b] <= t, by bisection."""
    lo = tl.zeros_like(t)
    hi = lo + (B - 1)
    span = B
    while span > 1:
        mid = (lo + hi) // 2
        beyond = tl.load(CU + mid + 1) <= t
        lo = tl.where(beyond, tl.minimum(mid + 1, hi), lo)
        hi = tl.where(beyond, hi, mid)
        span = (span + 1) // 2
    return lo


@triton.jit
def position_of(t, i, b, places, offset, B, positions, inside):  # (B_T,) each
    """Return the row of the tables for token t, row i of batch entry b; clamped, so that no table is read out of
    bounds."""
    if places.CU is not None:
        b = sequence_of(t, places.CU, B)
        i = t - tl.load(places.CU + b)
    i += offset
    if places.OFFSETS is not None:
        i += tl.load(places.OFFSETS + b, mask=inside, other=0)
    return tl.minimum(tl.maximum(i, 0), positions - 1)


@triton.jit
def load_pairs(X, p, P, stride_d, valid, INTERLEAVED: tl.constexpr):  # X, valid (B_T, B_H, 1), p (B_P,)
    """Load the first and the second of each pair, (B_T, B_H, B_P): neighbours if interleaved, else P apart."""
    if INTERLEAVED:
        d = tl.arange(0, 2 * p.shape[0]).to(tl.int64)[None, None, :]
        x = tl.load(X + d * stride_d, mask=valid & (d < 2 * P), other=0.0)
        return tl.split(tl.reshape(x, [X.shape[0], X.shape[1], p.shape[0], 2]))
    else:
        p = p[None, None, :]
        valid = valid & (p < P)
        return tl.load(X + p * stride_d, mask=valid, other=0.0), tl.load(X + (p + P) * stride_d, mask=valid, other=0.0)


@triton.jit
def store_pairs(Y, y_0, y_1, p, P, valid, INTERLEAVED: tl.constexpr):
    """Store pairs as load_pairs loads them, into contiguous memory."""
    if INTERLEAVED:
        d = tl.arange(0, 2 * p.shape[0]).to(tl.int64)[None, None, :]
        y = tl.reshape(tl.join(y_0, y_1), [Y.shape[0], Y.shape[1], 2 * p.shape[0]])
        tl.store(Y + d, y, mask=valid & (d < 2 * P))
    else:
        p = p[None, None, :]
        valid = valid & (p < P)
        tl.store(Y + p, y_0, mask=valid)
        tl.store(Y + p + P, y_1, mask=valid)


@triton.jit
def rotate_heads(
    x, first, t, i, b, c, s, inside, p, P, D, INTERLEAVED: tl.constexpr, B_H: tl.constexpr, B_REST: tl.constexpr
):
    """Rotate the heads from `first` on of a block of tokens, and copy the dimensions that have no angle."""
    H, h = x.H // 2, first + tl.arange(0, B_H).to(tl.int64)
    valid = (inside[:, None] & (h < H)[None, :])[:, :, None]  # (B_T, B_H, 1)
    rows = b * x.stride_b + i * x.stride_s
    X = x.X + (rows[:, None] + h[None, :] * x.stride_h)[:, :, None]
    Y = x.Y + ((t[:, None] * H + h[None, :]) * D)[:, :, None]
    x_0, x_1 = load_pairs(X, p, P, x.stride_d, valid, INTERLEAVED)  # (B_T, B_H, B_P)
    x_0, x_1 = x_0.to(c.dtype), x_1.to(c.dtype)
    y_0 = (x_0 * c - x_1 * s).to(Y.dtype.element_ty)
    y_1 = (x_1 * c + x_0 * s).to(Y.dtype.element_ty)
    store_pairs(Y, y_0, y_1, p, P, valid, INTERLEAVED)
    if B_REST > 0:
        d = (2 * P + tl.arange(0, B_REST).to(tl.int64))[None, None, :]
        rest = valid & (d < D)
        tl.store(Y + d, tl.load(X + d * x.stride_d, mask=rest), mask=rest)


@triton.jit(do_not_specialize=["tokens", "S", "B", "positions", "offset"])
def rotary_embedding(
    xs, tables, places, tokens, S, B, positions, offset, direction, P, D,
    INTERLEAVED: tl.constexpr, B_T: tl.constexpr, B_H: tl.constexpr, B_P: tl.constexpr, B_REST: tl.constexpr,
):  # fmt: skip
    """Rotate xs on the grid (blocks of tokens, blocks of heads of all xs). `direction` is 1.0, or -1.0 for the
    inverse."""
    t = tl.program_id(0).to(tl.int64) * B_T + tl.arange(0, B_T)  # (B_T,)
    inside = t < tokens
    b = t // S
    i = t - b * S
    ACC: tl.constexpr = tl.float64 if xs[0].X.dtype.element_ty == tl.float64 else tl.float32
    row = position_of(t, i, b, places, offset, B, positions, inside)
    p = tl.arange(0, B_P).to(tl.int64)
    angled = inside[:, None] & (p < P)[None, :]
    c = tl.load(tables.COS + row[:, None] * tables.stride_cos + p[None, :], mask=angled, other=0.0)
    s = tl.load(tables.SIN + row[:, None] * tables.stride_sin + p[None, :], mask=angled, other=0.0)
    c = c.to(ACC)[:, None, :]  # (B_T, 1, B_P)
    s = (s.to(ACC) * direction)[:, None, :]
    block = tl.program_id(1)
    for n in tl.static_range(len(xs)):
        blocks = tl.cdiv(xs[n].H // 2, B_H)
        if (block >= 0) & (block < blocks):
            rotate_heads(xs[n], block * B_H, t, i, b, c, s, inside, p, P, D, INTERLEAVED, B_H, B_REST)
        block -= blocks
