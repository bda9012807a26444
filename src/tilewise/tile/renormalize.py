"""Compute row sums of P for the backward with a bias.

The backward computes P = exp(S - lse). A bias may fill a row with -1e9 or torch.finfo(...).min. S is then so large that
lse = m + log l loses log l, and P would be 1 where it was 1 / l. So with a bias the last score of the backward
subtracts lse from S (`minus_lse_fn` in scores.py). L, of which P = exp(S - lse - L), is what was lost.
"""

import triton
import triton.language as tl

from .blocks import block, load_row_values
from .factors import load_left, load_right, product
from .gradients import seen
from .ranges import Place
from .rows import row_values, rows_of, scratch_values
from .scores import Entries, apply_scores
from .softmax import LN2, log2, probabilities

LARGE_LSE = tl.constexpr(4096.0)
"""Bounds the lse from below: rounding a smaller one changes P by 2^-12 of itself at most, less than it does S."""


@triton.jit
def is_large(lse):
    """Tell which rows have a finite lse that large."""
    return (tl.abs(lse) >= LARGE_LSE) & (tl.abs(lse) < float("inf"))


@triton.jit(do_not_specialize=["packed", "variant", "M", "N", "H", "tiles", "stride"])
def attention_backward_renormalize(
    Q, K, L, lse, packed, variant, unit, M, N, H, tiles, stride, BLOCK: tl.constexpr, tile: tl.constexpr
):
    """Compute L = log(sum_j exp(S - lse)) of rows whose lse is large, so that P sums to 1; 0 elsewhere.

    One program owns a tile of queries. `variant` is the backward's. L has `stride` numbers a head.
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = t * B_R
    logs = load_row_values(row_values(lse, packed, b, h, H, q0, rows_in_all), i0, B_R, M, 0.0, True)
    large = is_large(logs)
    EXACT: tl.constexpr = Q.ptr.dtype.element_ty == tl.float32
    sums = tl.zeros([B_R], tl.float32)
    if tl.max(large.to(tl.int32), 0) > 0:
        place = Place(b, h, b * H + h, i0, M, N, N - M)
        i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
        q = load_left(block(Q, b, h, q0, B_R, d), i0, M, True, PRECISION)  # (B_r, d)
        keys = block(K, b, h // G, k0, B_C, d)
        for x in range(tl.cdiv(N, B_C)):
            j0 = x * B_C
            S = product(q, load_right(keys, j0, N, True, PRECISION), PRECISION)  # (B_r, B_c)
            at = Entries(b, h, i0 + i + place.shift, 0, j0, j)
            S = apply_scores(variant.scores, S, at, len(variant.scores))
            S = tl.where(seen(place, variant, i, j0, j), S, float("-inf"))
            sums += tl.sum(probabilities(S, 0.0, unit, EXACT), 1)
    whole, rest = log2(sums)
    found = tl.where(large & (sums > 0.0), (whole + rest) * LN2 if EXACT else whole + rest, 0.0)
    rows = i0 + tl.arange(0, B_R)
    tl.store(L + scratch_values(packed, b, h, H, q0, stride, BLOCK) + rows, found, mask=rows < M)
