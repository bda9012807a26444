"""The forward kernel: one program owns a tile of queries and walks the key tiles it sees (FlashAttention-2's order)."""

import triton
import triton.language as tl

from ..tile.dropout import kept
from ..tile.masks import visible
from ..tile.rows import origin, rows_of
from ..tile.schedule import assign
from ..tile.scores import through
from ..tile.softmax import finalize, join_sink, online_softmax
from .blocks import key_range, list_at, load_rows, offsets, partial_at, store_rows, tile_at


@triton.jit
def step(j, q, acc, m, l, K, V, k_start, v_start, at_k, at_v, where, values, c, S_: tl.constexpr, MASKED: tl.constexpr):
    """One key tile: S = Q K^T, its scores and mask, the online softmax, O += P V."""
    b, h, row, i0, N, shift = where
    mask, scores, dropout = values
    B_R: tl.constexpr = q.shape[0]
    B_C: tl.constexpr = at_k.shape[0]
    j0 = j * B_C
    k = load_rows(k_start, K, at_k, j0, N, S_[0], MASKED)  # (B_c, d)
    S = tl.dot(q, k.T, input_precision=S_[2])  # (B_r, B_c)
    i = i0 + tl.arange(0, B_R)[:, None] + shift
    columns = j0 + tl.arange(0, B_C)[None, :]
    S = through(scores, S, b, h, i, columns, len(scores))
    if MASKED:
        S = tl.where(visible(mask, b, h, i, columns) & (columns < N), S, float("-inf"))
    P, alpha, m, l = online_softmax(S, m, l, c)
    if dropout is not None:
        P = P * kept(dropout, row, i0, tl.arange(0, B_R)[:, None], j0, tl.arange(0, B_C)[None, :])
    v = load_rows(v_start, V, at_v, j0, N, S_[1], MASKED)  # (B_c, d_v)
    if v.dtype == tl.float32:
        # matrix units truncate as they sum: a fresh sum per tile, added by FMA, keeps long rows exact
        acc = tl.fma(acc, alpha[:, None], tl.dot(P, v, input_precision=S_[2]))
    else:
        acc = tl.dot(P.to(v.dtype), v, acc * alpha[:, None])  # (B_r, d_v)
    return acc, m, l


# lengths, and what is counted from them: a new length costs no compile
@triton.jit(
    do_not_specialize=["L", "packed", "mask", "scores", "dropout", "visits", "M", "N", "H", "heads", "section", "tiles"]
)
def forward(
    Q, K, V, O, L, packed, sink, mask, scores, dropout, visits,
    c, M, N, H, heads, section, tiles,
    G: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O and L for every tile of queries. c turns logits into base 2; G query heads share a key head."""
    bh, t = assign(tl.program_id(0), tiles, heads, section)
    b, h = bh // H, bh % H
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = t * B_R
    if i0 >= M:
        return
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(d))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(d_v))
    q = load_rows(origin(Q, b, h, q0), Q, offsets(Q, B_R, d, BLOCK), i0, M, d, True)  # (B_r, d)
    k_start, v_start = origin(K, b, h // G, k0), origin(V, b, h // G, k0)
    at_k, at_v = offsets(K, B_C, d, BLOCK), offsets(V, B_C, d_v, BLOCK_V)
    acc = tl.zeros([B_R, BLOCK_V], tl.float32)
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    shift = N - M
    at = list_at(visits, b, h, t)
    lo, full_lo, full_hi, hi = key_range(visits, at, mask, b, i0 + shift, tl.minimum(i0 + B_R, M) - 1 + shift, N, B_C)
    for x in range(full_lo, full_hi):  # every entry is seen
        acc, m, l = step(
            tile_at(visits, at, x), q, acc, m, l, K, V, k_start, v_start, at_k, at_v,
            (b, h, bh, i0, N, shift), (mask, scores, dropout), c, (d, d_v, PRECISION), False,
        )  # fmt: skip
    for x in range(full_lo - lo + hi - full_hi):  # edges of the mask, and the ragged end
        acc, m, l = step(
            partial_at(visits, at, x, lo, full_lo, full_hi), q, acc, m, l, K, V, k_start, v_start, at_k, at_v,
            (b, h, bh, i0, N, shift), (mask, scores, dropout), c, (d, d_v, PRECISION), True,
        )  # fmt: skip
    if sink is not None:
        m, l, alpha = join_sink(m, l, c, tl.load(sink + h).to(tl.float32))
        acc = acc * alpha[:, None]
    inverse, lse = finalize(m, l, c)
    store_rows(origin(O, b, h, q0), O, offsets(O, B_R, d_v, BLOCK_V), i0, M, acc * inverse[:, None], d_v)
    rows = i0 + tl.arange(0, B_R)
    tl.store(origin(L, b, h, q0) + rows, lse, mask=rows < M)
