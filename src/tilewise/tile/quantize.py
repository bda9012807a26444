"""Quantize Q, K and V for 8-bit attention: quantize.py, whose bits these kernels compute, says what and why.

They must be compiled without fusing products and sums. All sums that reach a code are in one order: butterflies, and
halves.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import first_block, origin, rows_of

INF = tl.constexpr(float("inf"))
INF_BITS = tl.constexpr(0x7F800000)
BLOCK_Q = tl.constexpr(64)
BLOCK_K = tl.constexpr(128)
SAMPLES = tl.constexpr(256)
LEAST = tl.constexpr(2.0**-100)
MOST = tl.constexpr(24)
MOST_OF_V = tl.constexpr(126)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
E4M3_NAN = tl.constexpr(127)


class Inputs(NamedTuple):
    """Hold what is quantized, as Rows; what a Padding shows: keys from starts (B,) up to ends (B,), or None; rotary's
    tables, as rotary.py's Tables, or None; and the scales (B, H_k) of Q, K and V that are bytes of e4m3, or None."""

    Q: object
    K: object
    V: object
    starts: object
    ends: object
    angles: object
    scales: object


class Codes(NamedTuple):
    """Hold what is made of it, as quantize.py's Codes."""

    q: object
    k: object
    q_descale: object
    k_descale: object
    q_shift: object
    mean: object
    balance: object
    v: object
    v_descale: object
    """v is of int8 here, the bits of e4m3; so are q and k where Inputs.scales are given."""


class Sizes(NamedTuple):
    """Hold the constants: G query heads share a key head; head sizes; columns of the codes; pairs that rotary turns,
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
def load_turned(X, at, rows, inside, angles, sizes: tl.constexpr):  # (R,), (R,)
    """Load rows of Q or K as load_block does, and turn them if there are angles. # (R, SIZE)"""
    x = load_block(X, at, rows, inside, sizes.d, sizes.SIZE)
    if angles is not None:
        x = turned(x, at + rows.to(tl.int64) * X.row, rows, inside, angles, sizes)
    return x


@triton.jit
def turned(x, at, rows, inside, angles, sizes: tl.constexpr):  # (R, SIZE), (R,), (R,), (R,)
    """Turn rows, at addresses `at`, by the angles of their positions, as rotary.py does; round to their type.

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
def store_tile(at, x, stride: tl.constexpr):  # (R, C)
    """Store rows, one every `stride` entries from `at` on."""
    tl.store(at + tl.arange(0, x.shape[0])[:, None] * stride + tl.arange(0, x.shape[1])[None, :], x)


@triton.jit
def store_rows(at, left, right, factor, kept):
    """Store int8 codes of rows, whose halves of columns these are, from `at` on."""
    C: tl.constexpr = 2 * left.shape[0]
    R: tl.constexpr = left.shape[1]
    whole = tl.permute(tl.join(int8(left, factor, kept), int8(right, factor, kept)), (1, 2, 0))
    store_tile(at, tl.reshape(whole, (R, C)), C)


@triton.constexpr_function
def rows_at_once(size):
    """Return how many rows of a block a program quantizes at a time: registers do not hold 128 x 256 entries."""
    return 128 if size <= 128 else 32


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
    """Return what turns numbers into int8 codes, and codes back, from the largest `size_bits`, which becomes 127: a
    factor, the bits of codes that stay, and the descale factor. It is 0 for zeros, and NaN for what is not finite."""
    finite = top < INF_BITS
    top = top.to(tl.float32, bitcast=True)
    exists = finite & (top >= LEAST)
    factor = tl.where(exists, tl.div_rn(127.0, tl.where(exists, top, 1.0)), 0.0)
    descale = tl.div_rn(tl.where(exists, top, 0.0), 127.0)
    return factor, tl.where(finite, 255, 0), tl.where(finite, descale, float("nan"))


@triton.jit
def int8(x, factor, kept):
    """Return int8 codes of numbers: those times the factor, rounded half to even."""
    rounded = x * factor + 12582912.0  # 1.5 * 2^23: the integer is in the last bits
    return (rounded.to(tl.int32, bitcast=True) & kept).to(tl.int8)


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


@triton.jit(do_not_specialize=["packed", "M", "N", "H_k"])
def attention_quantize_statistics(x, codes, packed, M, N, H_k, SMOOTH: tl.constexpr, sizes: tl.constexpr):
    """Compute the mean and the balance of one key head from SAMPLES rows, whose loads begin together."""
    SIZE: tl.constexpr = sizes.SIZE
    G: tl.constexpr = sizes.G
    b, h = tl.program_id(0) // H_k, tl.program_id(0) % H_k
    q0, M, k0, N = rows_of(packed, b, M, N)
    lo, hi = key_bounds(x, b, N)
    count = tl.maximum(hi - lo, 0)
    lanes = tl.arange(0, 16)
    keys, queries = origin(x.K, b, h, k0), origin(x.Q, b, h * G, q0)
    mean = tl.zeros([SIZE], tl.float32)
    if SMOOTH:
        total = tl.zeros([16, SIZE], tl.float32)
        for n in tl.range(SAMPLES // 16, loop_unroll_factor=16):
            rows = lo + (n * 16 + lanes).to(tl.int64) * count // SAMPLES
            total += finite(load_turned(x.K, keys, rows, (lanes < 16) & (count > 0), x.angles, sizes))
        mean = halved(total) / SAMPLES
    of_keys, of_queries = tl.zeros([16, SIZE], tl.float32), tl.zeros([16, SIZE], tl.float32)
    for n in tl.range(SAMPLES // 16, loop_unroll_factor=16):
        turn = n * 16 + lanes
        rows = lo + turn.to(tl.int64) * count // SAMPLES
        away = finite(load_turned(x.K, keys, rows, (lanes < 16) & (count > 0), x.angles, sizes)) - mean[None, :]
        of_keys += away * away
        rows = turn.to(tl.int64) * M // SAMPLES
        inside = (lanes < 16) & (M > 0)
        columns = tl.arange(0, SIZE)
        at = queries + (rows * x.Q.row + (turn % G).to(tl.int64) * x.Q.head)
        exists = inside[:, None] & (columns < sizes.d)[None, :]
        q = tl.load(at[:, None] + columns[None, :], mask=exists, other=0.0).to(tl.float32)
        if x.angles is not None:
            q = turned(q, at, rows, inside, x.angles, sizes)
        q = finite(q)
        of_queries += q * q
    below = halved(of_queries)
    quotient = tl.div_rn(halved(of_keys), tl.where(below > 0.0, below, 1.0))
    usable = (quotient > 0.0) & (quotient < INF) & (below > 0.0)
    bits = tl.where(usable, quotient, 1.0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits - (125 << 23)) >> 25, -MOST), MOST)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(codes.mean + at, mean)
    tl.store(codes.balance + at, power(exponent))


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
        q = load_turned(x.Q, origin(x.Q, b, h, first), rows, rows < length, x.angles, sizes)
        own = block * BLOCK_Q + row + tl.arange(0, ROWS)
        tl.store(codes.q_shift + own, tl.sum(q * mean[None, :], 1) * scale)
        left, right = rotated(q * balance[None, :], log2_of(SIZE))
        factor, kept, descale = int8_scale(largest_bits(left, right))
        store_rows(codes.q + (block * BLOCK_Q + row) * SIZE, left, right, factor[None, :], kept[None, :])
        tl.store(codes.q_descale + own, descale * (1.0 / SIZE))


@triton.jit
def rotated_keys(x, at, row, lo, hi, mean, balance, sizes: tl.constexpr):  # (SIZE,), (SIZE,)
    """Load keys from `row` on, smoothed, balanced and rotated, as `rotated` returns them."""
    rows = row + tl.arange(0, rows_at_once(sizes.SIZE))
    inside = (rows >= lo) & (rows < hi)
    k = load_turned(x.K, at, rows, inside, x.angles, sizes)
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
    factor, kept, descale = int8_scale(tl.maximum(top, tl.max(largest_bits(left, right), 0)))
    tl.store(codes.k_descale + block, descale)
    store_rows(codes.k + own * SIZE, left, right, factor, kept)
    for row in range(ROWS, BLOCK_K, ROWS):
        left, right = rotated_keys(x, at, j0 + row, lo, hi, mean, balance, sizes)
        store_rows(codes.k + (own + row) * SIZE, left, right, factor, kept)


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
def largest_finite(x):
    """Return the largest |x| that is finite."""
    return tl.max(tl.where(tl.abs(x) < INF, tl.abs(x), 0.0))


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
