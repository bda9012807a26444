"""Quantize Q, K and V for 8-bit attention: codes.py, whose bits this kernel computes, says what and why.

It must be compiled without fusing products and sums. All sums that reach a code are in one order: butterflies, and
halves.
"""

import triton
import triton.language as tl

from ..tile.rows import first_block, origin, rows_of
from .rounding import (
    E4M3_NAN,
    INF_BITS,
    MOST_OF_V,
    e4m3,
    int8_scale,
    key_order,
    largest_bits,
    largest_finite,
    log2_of,
    power,
    rotated,
    signs_of,
    size_bits,
    store_rows,
)
from .rows import BLOCK_K, BLOCK_Q, key_bounds, load_block, load_entries, load_with_rotary, rows_at_once, store_tile


@triton.jit
def quantize_queries(x, codes, b, h, first, t, length, block, head, scale, sizes: tl.constexpr):
    """Write a block of 64 queries."""
    SIZE: tl.constexpr = sizes.SIZE
    ROWS: tl.constexpr = min(BLOCK_Q.value, rows_at_once(SIZE))
    columns = tl.arange(0, SIZE)
    mean = tl.load(codes.mean + head * SIZE + columns)
    balance = tl.load(codes.balance + head * SIZE + columns) * signs_of(SIZE)
    for row in range(0, BLOCK_Q, ROWS):
        rows = t * BLOCK_Q + row + tl.arange(0, ROWS)
        q = load_with_rotary(x.Q, origin(x.Q, b, h, first), rows, rows < length, x.angles, sizes)
        own = block * BLOCK_Q + row + tl.arange(0, ROWS)
        tl.store(codes.q_shift + own, tl.sum(q * mean[None, :], 1) * scale)
        left, right = rotated(q * balance[None, :], log2_of(SIZE))
        factor, mask, descale = int8_scale(largest_bits(left, right))
        store_rows(codes.q + (block * BLOCK_Q + row) * SIZE, left, right, factor[None, :], mask[None, :])
        tl.store(codes.q_descale + own, descale * (1.0 / SIZE))


@triton.jit
def rotated_keys(x, at, row, lo, hi, mean, balance, sizes: tl.constexpr):  # (SIZE,), (SIZE,)
    """Load keys from `row` on, smoothed, balanced and rotated, as `rotated` returns them."""
    rows = row + tl.arange(0, rows_at_once(sizes.SIZE))
    inside = (rows >= lo) & (rows < hi)
    k = load_with_rotary(x.K, at, rows, inside, x.angles, sizes)
    return rotated(tl.where(inside[:, None], (k - mean[None, :]) * balance[None, :], 0.0), log2_of(sizes.SIZE))


@triton.jit
def quantize_keys(x, codes, b, h, first, t, lo, hi, block, head, sizes: tl.constexpr):
    """Write a block of 128 keys. Only its first rows stay in registers until its largest entry is known."""
    SIZE: tl.constexpr = sizes.SIZE
    ROWS: tl.constexpr = rows_at_once(SIZE)
    at, j0 = origin(x.K, b, h, first), t * BLOCK_K
    columns, own = tl.arange(0, SIZE), block * BLOCK_K
    mean = tl.load(codes.mean + head * SIZE + columns)
    balance = signs_of(SIZE) / tl.load(codes.balance + head * SIZE + columns)  # exact: powers of two
    top = 0
    for row in range(ROWS, BLOCK_K, ROWS):
        left, right = rotated_keys(x, at, j0 + row, lo, hi, mean, balance, sizes)
        top = tl.maximum(top, tl.max(largest_bits(left, right), 0))
    left, right = rotated_keys(x, at, j0, lo, hi, mean, balance, sizes)
    factor, mask, descale = int8_scale(tl.maximum(top, tl.max(largest_bits(left, right), 0)))
    tl.store(codes.k_descale + block, descale)
    store_rows(codes.k + own * SIZE, left, right, factor, mask)
    for row in range(ROWS, BLOCK_K, ROWS):
        left, right = rotated_keys(x, at, j0 + row, lo, hi, mean, balance, sizes)
        store_rows(codes.k + (own + row) * SIZE, left, right, factor, mask)


@triton.jit
def values_of(V, at, row, lo, hi, d_v: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Load ROWS values from `row` on, in the order of `key_order`. # (ROWS, SIZE)"""
    rows = row + key_order(ROWS)
    return load_block(V, at, rows, (rows >= lo) & (rows < hi), d_v, SIZE)


@triton.jit
def store_values(codes, v, exponent, at):
    """Store values, 2^exponent times as large, as the columns of the codes from `at` on."""
    finite = size_bits(v) < INF_BITS
    whole = e4m3(v * power(exponent)).to(tl.int8, bitcast=True)
    store_tile(codes.v + at, tl.where(finite, whole, E4M3_NAN).T, BLOCK_K)


@triton.jit
def quantize_values(x, codes, b, h, first, t, lo, hi, block, sizes: tl.constexpr):
    """Write a block of 128 rows of V, transposed, with its keys in another order."""
    SIZE: tl.constexpr = sizes.SIZE
    ROWS: tl.constexpr = rows_at_once(SIZE)
    at, j0, own = origin(x.V, b, h, first), t * BLOCK_K, block * SIZE * BLOCK_K
    top = 0.0
    for row in range(ROWS, BLOCK_K, ROWS):
        top = tl.maximum(top, largest_finite(values_of(x.V, at, j0 + row, lo, hi, sizes.d_v, ROWS, SIZE)))
    v = values_of(x.V, at, j0, lo, hi, sizes.d_v, ROWS, SIZE)
    top = tl.maximum(top, largest_finite(v))
    exponent = tl.minimum(134 - (top.to(tl.int32, bitcast=True) >> 23), MOST_OF_V)
    store_values(codes, v, exponent, own)
    for row in range(ROWS, BLOCK_K, ROWS):
        store_values(codes, values_of(x.V, at, j0 + row, lo, hi, sizes.d_v, ROWS, SIZE), exponent, own + row)
    tl.store(codes.v_descale + block, power(-exponent))


@triton.jit
def copy_queries(x, codes, b, h, first, t, length, block, head, sizes: tl.constexpr):
    """Copy a block of 64 queries of e4m3."""
    rows, own = t * BLOCK_Q + tl.arange(0, BLOCK_Q), block * BLOCK_Q
    q = load_entries(x.Q, origin(x.Q, b, h, first), rows, rows < length, sizes.d, sizes.SIZE)
    store_tile(codes.q + own * sizes.SIZE, q, sizes.SIZE)
    own += tl.arange(0, BLOCK_Q)
    tl.store(codes.q_descale + own, tl.load(x.scales[0] + head))
    tl.store(codes.q_shift + own, 0.0)


@triton.jit
def copy_keys(x, codes, b, h, first, t, length, block, head, sizes: tl.constexpr):
    """Copy a block of 128 keys of e4m3."""
    rows = t * BLOCK_K + tl.arange(0, BLOCK_K)
    k = load_entries(x.K, origin(x.K, b, h, first), rows, rows < length, sizes.d, sizes.SIZE)
    store_tile(codes.k + block * BLOCK_K * sizes.SIZE, k, sizes.SIZE)
    tl.store(codes.k_descale + block, tl.load(x.scales[1] + head))


@triton.jit
def copy_values(x, codes, b, h, first, t, length, block, head, sizes: tl.constexpr):
    """Copy a block of 128 rows of V of e4m3, transposed, with its keys in another order."""
    rows = t * BLOCK_K + key_order(BLOCK_K)
    v = load_entries(x.V, origin(x.V, b, h, first), rows, rows < length, sizes.d_v, sizes.SIZE)
    store_tile(codes.v + block * BLOCK_K * sizes.SIZE, v.T, BLOCK_K)
    tl.store(codes.v_descale + block, tl.load(x.scales[2] + head))


@triton.jit(do_not_specialize=["packed", "scale", "M", "N", "H", "q_tiles", "k_tiles", "q_stride", "k_stride", "of_q"])
def attention_quantize(
    x, codes, packed, scale, M, N, H, q_tiles, k_tiles, q_stride, k_stride, of_q, sizes: tl.constexpr,
):  # fmt: skip
    """Quantize a block of Q, K or V, or copy one of e4m3: the first `of_q` programs Q, then the others in turns K and
    V. `q_stride` and `k_stride` count a head's blocks. A sequence without keys has one block of zeros, which Hopper's
    loop reads."""
    program = tl.program_id(0)
    G: tl.constexpr = sizes.G
    if program < of_q:
        t, h, b = program % q_tiles, program // q_tiles % H, program // q_tiles // H
        q0, length, _, _ = rows_of(packed, b, M, N)
        if t * BLOCK_Q < length:
            block = first_block(packed, b, h, H, q0, q_stride, BLOCK_Q).to(tl.int64) + t
            head = b.to(tl.int64) * (H // G) + h // G
            if x.scales is None:
                quantize_queries(x, codes, b, h, q0, t, length, block, head, scale, sizes)
            else:
                copy_queries(x, codes, b, h, q0, t, length, block, head, sizes)
    else:
        program -= of_q
        PARTS: tl.constexpr = 1 if codes.v is None else 2
        which, program = program % PARTS, program // PARTS
        H_k = H // G
        t, h, b = program % k_tiles, program // k_tiles % H_k, program // k_tiles // H_k
        _, _, k0, length = rows_of(packed, b, M, N)
        if t * BLOCK_K < tl.maximum(length, 1):
            lo, hi = key_bounds(x, b, length)
            block = first_block(packed, b, h, H_k, k0, k_stride, BLOCK_K).to(tl.int64) + t
            head = b.to(tl.int64) * H_k + h
            if which == 0:
                if x.scales is None:
                    quantize_keys(x, codes, b, h, k0, t, lo, hi, block, head, sizes)
                else:
                    copy_keys(x, codes, b, h, k0, t, length, block, head, sizes)
            if codes.v is not None:  # noqa: SIM102, the first is a constant
                if which == 1:
                    if x.scales is None:
                        quantize_values(x, codes, b, h, k0, t, lo, hi, block, sizes)
                    else:
                        copy_values(x, codes, b, h, k0, t, length, block, head, sizes)
