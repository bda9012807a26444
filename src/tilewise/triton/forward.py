"""The forward kernel: one program per query tile loops over the key tiles it sees, as in FlashAttention-2."""
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ..quantize.rounding import on_e4m3_grid
from ..quantize.rows import BLOCK_K, BLOCK_Q
from ..tile.blocks import block, store_rows, width
from ..tile.dropout import dropout_mask
from ..tile.factors import left_slices, load_left, load_right, load_values, product
from ..tile.masks import visible
from ..tile.ranges import Place, key_range, list_at, partial_at, tile_at
from ..tile.rows import fill_unused, first_block, row_values, rows_of
from ..tile.schedule import assign, counts
from ..tile.scores import Entries, apply_scores
from ..tile.softmax import finalize, join_sink, online_softmax


@triton.jit
def load_codes(values, j0, SIZE: tl.constexpr, B_C: tl.constexpr, COLUMNS: tl.constexpr):
    """Load V's codes of the keys from j0 on, and their descale factor. # (B_c, COLUMNS)"""
    first = (j0 // BLOCK_K).to(tl.int64) * SIZE * BLOCK_K + j0 % BLOCK_K
    at = values[0] + first + tl.arange(0, COLUMNS)[:, None] * BLOCK_K + tl.arange(0, B_C)[None, :]
    return tl.load(at).to(tl.float8e4nv, bitcast=True).T, tl.load(values[1] + j0 // BLOCK_K)


@triton.jit
def in_key_order(P):
    """Return P with its columns in the order in which V's codes hold the keys."""
    ROWS: tl.constexpr = P.shape[0]
    COLUMNS: tl.constexpr = P.shape[1]
    P = tl.permute(tl.reshape(P, (ROWS, COLUMNS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(P, (ROWS, COLUMNS))


@triton.jit
def step(j, q, acc, m, l, K, V, descale, values, place, variant, c, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One key tile: S = Q K^T, its scores and mask, the online softmax, O += P V. `values` are V's codes, or ()."""
    B_R: tl.constexpr = acc.shape[0]
    B_C: tl.constexpr = K.at.shape[0]
    j0 = j * B_C
    S = product(q, load_right(K, j0, place.N, MASKED, PRECISION), PRECISION)  # (B_r, B_c)
    if descale is not None:
        S = S.to(tl.float32) * (descale[0] * tl.load(descale[1] + j0 // BLOCK_K))[:, None]
    i = place.i0 + tl.arange(0, B_R)[:, None] + place.shift
    columns = j0 + tl.arange(0, B_C)[None, :]
    S = apply_scores(variant.scores, S, Entries(place.b, place.h, i, 0, columns, 0), len(variant.scores))
    if MASKED:
        seen = visible(variant.mask, place.b, place.h, i, columns) & (columns < place.N)
        S = tl.where(seen, S, float("-inf"))
    P, alpha, m, l_new = online_softmax(S, m, l, c)
    if len(values) > 0:
        P = on_e4m3_grid(P * 256.0)  # in fp32: ptxas sums packed words before their registers are set
        if len(variant.scores) == 0:
            l_new = l * alpha + tl.sum(P, 1) * 0.00390625
        v, scale = load_codes(values, j0, K.at.shape[1], B_C, acc.shape[1])
        PV = tl.dot(in_key_order(P.to(tl.float8e4nv)), v)
        return tl.fma(acc, alpha[:, None], PV * (scale * 0.00390625)), m, l_new
    l = l_new
    if variant.dropout is not None:
        P *= dropout_mask(variant.dropout, place, place.i0, tl.arange(0, B_R)[:, None], j0, tl.arange(0, B_C)[None, :])
    v = load_values(V, j0, place.N, MASKED, PRECISION)  # (B_c, d_v)
    P = left_slices(P, v[0].dtype, PRECISION)
    if v[0].dtype == tl.float32:
        # matrix units truncate as they accumulate: a new sum per tile, added by FMA, keeps long rows exact
        acc = tl.fma(acc, alpha[:, None], product(P, v, PRECISION))
    else:
        acc = tl.dot(P[0].to(v[0].dtype), v[0], acc * alpha[:, None])  # (B_r, d_v)
    return acc, m, l


# lengths, and numbers that follow from them; inside NamedTuples, Triton still specializes on multiples of 16
@triton.jit(do_not_specialize=["packed", "unused", "variant", "M", "N", "H", "schedule"])
def attention_forward(Q, K, V, O, L, packed, unused, variant, c, M, N, H, schedule, tile: tl.constexpr):
    """Compute O and L of one query tile.

    Multiplying logits by c converts them to base 2; c may be None (see `row_max`).
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    tiles, heads, section = counts(schedule)
    matrix, t = assign(tl.program_id(0), tiles, heads, section)
    b, h = matrix // H, matrix % H
    rows_in_all = M
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = t * B_R
    if i0 >= M:
        return
    place = Place(b, h, matrix, i0, M, N, N - M)
    descale, of_v = None, ()
    if variant.codes is None:
        q_at, k_at = q0, k0
    else:  # each sequence begins with a block
        codes = variant.codes
        q_at = first_block(packed, b, h, H, q0, codes.q_stride >> 1, BLOCK_Q).to(tl.int64) * BLOCK_Q
        k_block = first_block(packed, b, h // G, H // G, k0, codes.k_stride >> 1, BLOCK_K).to(tl.int64)
        k_at = k_block * BLOCK_K
        own = i0 + tl.arange(0, B_R)
        descale = tl.load(codes.q_descale + q_at + own, mask=own < M, other=0.0), codes.k_descale + k_block
        if len(codes.of_values) > 0:
            of_v = codes.of_values[0] + k_at * width(tl.int8, d), codes.of_values[1] + k_block
    q = load_left(block(Q, b, h, q_at, B_R, d), i0, M, True, PRECISION)  # (B_r, d)
    keys, values = block(K, b, h // G, k_at, B_C, d), block(V, b, h // G, k0, B_C, d_v)
    out = block(O, b, h, q0, B_R, d_v)
    acc = tl.zeros(out.at.shape, tl.float32)
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    lists = list_at(variant.lists, b, h, t)
    lo, full_lo, full_hi, hi = key_range(variant, lists, place, B_R, B_C)
    for x in range(full_lo, full_hi):  # full tiles: the mask hides no entry
        j = tile_at(variant.lists, lists, x)
        acc, m, l = step(j, q, acc, m, l, keys, values, descale, of_v, place, variant, c, False, PRECISION)
    for x in range(full_lo - lo + hi - full_hi):  # partial tiles: edges of the mask, and the last tile
        j = partial_at(variant.lists, lists, x, lo, full_lo, full_hi)
        acc, m, l = step(j, q, acc, m, l, keys, values, descale, of_v, place, variant, c, True, PRECISION)
    if variant.sink is not None:
        m, l, alpha = join_sink(m, l, tl.load(variant.sink + h).to(tl.float32), c is None)
        acc = acc * alpha[:, None]
    inverse, lse = finalize(m, l, c is None)
    store_rows(out, i0, M, acc * inverse[:, None])
    rows = i0 + tl.arange(0, B_R)
    if variant.codes is not None:
        shift = tl.load(variant.codes.q_shift + q_at + rows, mask=rows < M, other=0.0)
        lse = tl.where(lse == float("-inf"), lse, lse + shift)
    tl.store(row_values(L, packed, b, h, H, q0, rows_in_all) + rows, lse, mask=rows < M)
