"""Before the main kernel of the fp32 backward: operands in 16-bit pieces, and what it reads of each row.

All of it lies in blocks of 64 rows, padded with zeros, each sequence in blocks of its own: the main kernel sees no
strides, ends or packed neighbours. Of each block there are the powers of two that undo the scales of its pieces, and
bounds from which the main kernel finds a scale for dS.

Attention does not change when one vector is taken from all keys of a head, and neither does dP - D when one is taken
from all values. So keys and values that lie around a point far from zero are centred there first: otherwise dQ would be
a small difference of large numbers, sum_j dS_ij K_j with sum_j dS_ij = 0.
"""

import triton
import triton.language as tl

from ..tile.rows import origin, row_values, rows_of
from ..tile.softmax import for_backward
from .around import first_block

SAMPLES = tl.constexpr(64)
BLOCK = tl.constexpr(64)
"""Rows that share a scale."""


@triton.jit
def power_of_two(largest):
    """The scale 2^n that brings a largest entry into [2^14, 2^15), where fp16 has most room, and 2^-n; n is at most 60,
    so that products of two 2^-n stay normal numbers."""
    n = 141 - (largest.to(tl.int32, bitcast=True) >> 23)
    n = tl.minimum(tl.maximum(n, -126), 60)
    return ((127 + n) << 23).to(tl.float32, bitcast=True), ((127 - n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_block(X, b, h, first, rows, length, d: tl.constexpr, SIZE: tl.constexpr):
    """Rows of a head, zero past the length and the head size, and which entries exist."""
    entries = tl.arange(0, SIZE)
    inside = (rows < length)[:, None] & (entries < d)[None, :]
    at = origin(X, b, h, first) + rows.to(tl.int64)[:, None] * X.row + entries[None, :]
    return tl.load(at, mask=inside, other=0.0), inside


@triton.jit
def store_pieces(pieces, x, block, rows_in_all, PIECES: tl.constexpr):
    """A block as a sum of 16-bit pieces, each the rounded rest of those before, and 1 / its scale."""
    scale, undo = power_of_two(tl.max(tl.abs(x)))
    rest = x * scale
    SIZE: tl.constexpr = x.shape[1]
    row = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    at = pieces + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    for i in tl.static_range(PIECES):
        piece = rest.to(pieces.dtype.element_ty)
        tl.store(at + i * rows_in_all * SIZE, piece)
        rest -= piece.to(tl.float32)
    return undo


@triton.jit
def longest(x):
    """The largest norm of a row."""
    return tl.max(tl.sqrt(tl.sum(x * x, 1)), 0)


@triton.jit
def centre(X, b, h, first, length, d: tl.constexpr, SIZE: tl.constexpr):
    """The mean of a sample of rows if all of them are nearer to it than it is to zero, else zero.

    Garbage behind a mask may be in the sample: then some real row is far from the mean.
    """
    rows = tl.arange(0, SAMPLES).to(tl.int64) * length // SAMPLES
    x, _ = load_block(X, b, h, first, rows, length, d, SIZE)
    mean = tl.sum(x, 0) / SAMPLES
    near = longest(x - mean[None, :]) < 0.75 * tl.sqrt(tl.sum(mean * mean, 0))  # false where anything is not finite
    return tl.where(near, mean, 0.0)


@triton.jit(do_not_specialize=["packed", "N", "H", "tiles", "stride", "rows_in_all"])
def prepare_keys(
    K, V, k_pieces, v_pieces, scales, centres, packed, N, H, tiles, stride, rows_in_all,
    d: tl.constexpr, d_v: tl.constexpr, B_C: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Pieces of one block of K and V; scales: 1 / both of theirs, and the largest norm of a row of V."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    _, _, k0, N = rows_of(packed, b, 0, N)
    if t * BLOCK >= tl.cdiv(N, B_C) * B_C:
        return
    rows = t * BLOCK + tl.arange(0, BLOCK)
    k, inside_k = load_block(K, b, h, k0, rows, N, d, SIZE)
    v, inside_v = load_block(V, b, h, k0, rows, N, d_v, SIZE)
    if CENTRED:
        k_centre, v_centre = centre(K, b, h, k0, N, d, SIZE), centre(V, b, h, k0, N, d_v, SIZE)
        k = tl.where(inside_k, k - k_centre[None, :], 0.0)
        v = tl.where(inside_v, v - v_centre[None, :], 0.0)
        if t == 0:
            at = centres + (b * H + h) * 2 * SIZE + tl.arange(0, SIZE)
            tl.store(at, k_centre)
            tl.store(at + SIZE, v_centre)
    block = (first_block(packed, b, h, H, k0, stride, B_C) * (B_C // BLOCK) + t).to(tl.int64)
    tl.store(scales + 4 * block, store_pieces(k_pieces, k, block, rows_in_all, PIECES))
    tl.store(scales + 4 * block + 1, store_pieces(v_pieces, v, block, rows_in_all, PIECES))
    tl.store(scales + 4 * block + 2, longest(v))


@triton.jit(do_not_specialize=["packed", "M", "H", "group", "tiles", "stride", "rows_in_all"])
def prepare_queries(
    Q, O, dO, dL, lse, q_pieces, do_pieces, scales, centres, L, D, dQ, packed, unit, M, H, group, tiles, stride,
    rows_in_all, d: tl.constexpr, d_v: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Of one block: pieces of Q and dO; L and D = rowsum(dO * O) - dL for centred K and V; zeros in dQ; scales: 1 / both
    of theirs, the largest norm of a row of dO, the largest |D|. Past the last row P = exp(S - L) must vanish."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    length = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * BLOCK >= M:
        return
    rows, entries = t * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    q, _ = load_block(Q, b, h, q0, rows, M, d, SIZE)
    do, inside = load_block(dO, b, h, q0, rows, M, d_v, SIZE)
    o, _ = load_block(O, b, h, q0, rows, M, d_v, SIZE)
    logs = tl.load(row_values(lse, packed, b, h, H, q0, length) + rows, mask=rows < M, other=float("inf"))
    logs = for_backward(logs, True)
    if CENTRED:
        at = centres + (b * (H // group) + h // group) * 2 * SIZE + entries
        logs -= unit * tl.sum(q * tl.load(at)[None, :], 1)
        o = tl.where(inside, o - tl.load(at + SIZE)[None, :], 0.0)
    sums = tl.sum(o * do, 1)
    if dL is not None:
        sums -= tl.load(row_values(dL, packed, b, h, H, q0, length) + rows, mask=rows < M, other=0.0)
    block = (first_block(packed, b, h, H, q0, stride, BLOCK) + t).to(tl.int64)
    tl.store(L + block * BLOCK + tl.arange(0, BLOCK), logs)
    tl.store(D + block * BLOCK + tl.arange(0, BLOCK), sums)
    tl.store(scales + 4 * block, store_pieces(q_pieces, q, block, rows_in_all, PIECES))
    tl.store(scales + 4 * block + 1, store_pieces(do_pieces, do, block, rows_in_all, PIECES))
    tl.store(scales + 4 * block + 2, longest(do))
    tl.store(scales + 4 * block + 3, tl.max(tl.abs(sums), 0))
    row = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(dQ + row[:, None] * SIZE + entries[None, :], tl.zeros([BLOCK, SIZE], tl.float32))
