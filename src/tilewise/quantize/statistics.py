"""The kernel that measures the mean and the balance of each key head."""

import triton
import triton.language as tl

from ..tile.rows import origin, rows_of
from .rounding import finite, halved, power
from .rows import INF, key_bounds, load_with_rotary, with_rotary

SAMPLES = tl.constexpr(256)
MOST = tl.constexpr(24)


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
            total += finite(load_with_rotary(x.K, keys, rows, (lanes < 16) & (count > 0), x.angles, sizes))
        mean = halved(total) / SAMPLES
    of_keys, of_queries = tl.zeros([16, SIZE], tl.float32), tl.zeros([16, SIZE], tl.float32)
    for n in tl.range(SAMPLES // 16, loop_unroll_factor=16):
        sample = n * 16 + lanes
        rows = lo + sample.to(tl.int64) * count // SAMPLES
        away = finite(load_with_rotary(x.K, keys, rows, (lanes < 16) & (count > 0), x.angles, sizes)) - mean[None, :]
        of_keys += away * away
        rows = sample.to(tl.int64) * M // SAMPLES
        inside = (lanes < 16) & (M > 0)
        columns = tl.arange(0, SIZE)
        at = queries + (rows * x.Q.row + (sample % G).to(tl.int64) * x.Q.head)
        exists = inside[:, None] & (columns < sizes.d)[None, :]
        q = tl.load(at[:, None] + columns[None, :], mask=exists, other=0.0).to(tl.float32)
        if x.angles is not None:
            q = with_rotary(q, at, rows, inside, x.angles, sizes)
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
