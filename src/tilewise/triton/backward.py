"""The backward kernels: delta, then dK and dV by key tiles, dQ by query tiles, and the gradient of biases.

S and P are computed again from lse (Dao et al. 2022, algorithm 4); no kernel adds to memory that another one wrote.
"""

import triton
import triton.language as tl

from ..tile.dropout import kept
from ..tile.masks import visible
from ..tile.rows import origin, rows_of
from ..tile.schedule import assign
from ..tile.scores import back, through
from ..tile.softmax import probabilities
from .blocks import key_range, list_at, load_rows, offsets, partial_at, query_range, store_rows, tile_at

# lengths, and what is counted from them: a new length costs no compile
NOT_SPECIALIZED = [
    "L", "D", "packed", "mask", "scores", "dropout", "visits", "one", "M", "N", "H", "heads", "section", "tiles",
]  # fmt: skip


@triton.jit(do_not_specialize=["D", "dL", "packed", "M", "H", "tiles"])
def delta(O, dO, dL, D, packed, M, H, tiles, d_v: tl.constexpr, B_R: tl.constexpr):
    """D = rowsum(dO * O) - dL; dL, the gradient of lse, may be None."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    q0, M, _, _ = rows_of(packed, b, M, 0)
    i0 = t * B_R
    if i0 >= M:
        return
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(d_v))
    o = load_rows(origin(O, b, h, q0), O, offsets(O, B_R, d_v, BLOCK), i0, M, d_v, True).to(tl.float32)
    do = load_rows(origin(dO, b, h, q0), dO, offsets(dO, B_R, d_v, BLOCK), i0, M, d_v, True).to(tl.float32)
    rows = i0 + tl.arange(0, B_R)
    sums = tl.sum(o * do, 1)  # (B_r,)
    if dL is not None:
        sums -= tl.load(origin(dL, b, h, q0) + rows.to(tl.int64) * dL.row, mask=rows < M, other=0.0)
    tl.store(origin(D, b, h, q0) + rows, sums, mask=rows < M)


@triton.jit
def scores_gradient(S, dP, L, D, where, values, c, i0, i_in, j0, j_in, STOP: tl.constexpr, MASKED: tl.constexpr):
    """(P after dropout, dS of the logits that entered score STOP) from S = Q K^T and dP = dO V^T.

    i_in, j_in are positions inside the tile and broadcast together either way round, so S may be transposed.
    """
    b, h, row, N, shift = where
    mask, scores, dropout = values
    i, j = i0 + i_in + shift, j0 + j_in
    S_out = through(scores, S, b, h, i, j, len(scores))
    if MASKED:
        S_out = tl.where(visible(mask, b, h, i, j) & (j < N), S_out, float("-inf"))
    P = probabilities(S_out, L, c)
    P_kept = P
    if dropout is not None:
        Z = kept(dropout, row, i0, i_in, j0, j_in)
        P_kept, dP = P * Z, dP * Z
    return P_kept, back(scores, P * (dP - D), S, b, h, i, j, STOP)


@triton.jit
def accumulate(acc, a, b, one, PRECISION: tl.constexpr):
    """acc + a b. In fp32 a fresh sum per tile is added by FMA, because matrix units truncate as they sum."""
    if b.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), one, acc)
    else:
        return tl.dot(a.to(b.dtype), b, acc)


@triton.jit
def dkdv_step(
    t, dk, dv, k, v, Q, dO, q_start, do_start, l_start, d_start, at_q, at_do, where, values, c, one,
    S_: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query tile's share of dK and dV, with S transposed: (B_c, B_r)."""
    b, h, row, j0, M, N = where
    B_R: tl.constexpr = at_q.shape[0]
    B_C: tl.constexpr = k.shape[0]
    i0 = t * B_R
    rows = i0 + tl.arange(0, B_R)
    q = load_rows(q_start, Q, at_q, i0, M, S_[0], MASKED)  # (B_r, d)
    do = load_rows(do_start, dO, at_do, i0, M, S_[1], MASKED)  # (B_r, d_v)
    if MASKED:
        L = tl.load(l_start + rows, mask=rows < M, other=float("inf"))  # exp(S - inf) = 0: rows past the end vanish
        D = tl.load(d_start + rows, mask=rows < M, other=0.0)
    else:
        L, D = tl.load(l_start + rows), tl.load(d_start + rows)
    S = tl.dot(k, q.T, input_precision=S_[2])  # (B_c, B_r)
    dP = tl.dot(v, do.T, input_precision=S_[2])  # (B_c, B_r)
    P, dS = scores_gradient(
        S, dP, L[None, :], D[None, :], (b, h, row, N, N - M), values, c,
        i0, tl.arange(0, B_R)[None, :], j0, tl.arange(0, B_C)[:, None], 0, MASKED,
    )  # fmt: skip
    dv = accumulate(dv, P, do, one, S_[2])
    dk = accumulate(dk, dS, q, one, S_[2])
    return dk, dv


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "H_k"])
def dkdv(
    Q, K, V, dO, L, D, dK, dV, packed, mask, scores, dropout, visits,
    c, factor, one, M, N, H_k, heads, section, tiles,
    G: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys: loops over its group of query heads and the query tiles that see it."""
    bh, reversed_t = assign(tl.program_id(0), tiles, heads, section)
    t = tiles - 1 - reversed_t  # the first keys are seen by the most queries
    b, h_k = bh // H_k, bh % H_k
    q0, M, k0, N = rows_of(packed, b, M, N)
    j0 = t * B_C
    if j0 >= N:
        return
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(d))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(d_v))
    k = load_rows(origin(K, b, h_k, k0), K, offsets(K, B_C, d, BLOCK), j0, N, d, True)  # (B_c, d)
    v = load_rows(origin(V, b, h_k, k0), V, offsets(V, B_C, d_v, BLOCK_V), j0, N, d_v, True)  # (B_c, d_v)
    at_q, at_do = offsets(Q, B_R, d, BLOCK), offsets(dO, B_R, d_v, BLOCK_V)
    dk = tl.zeros([B_C, BLOCK], tl.float32)
    dv = tl.zeros([B_C, BLOCK_V], tl.float32)
    last = tl.minimum(j0 + B_C, N) - 1
    for g in range(G):
        h = h_k * G + g
        row = b * (H_k * G) + h
        q_start, do_start = origin(Q, b, h, q0), origin(dO, b, h, q0)
        l_start, d_start = origin(L, b, h, q0), origin(D, b, h, q0)
        at = list_at(visits, b, h, t)
        lo, full_lo, full_hi, hi = query_range(visits, at, mask, b, j0, last, M, N - M, B_R)
        for x in range(full_lo - lo + hi - full_hi):
            dk, dv = dkdv_step(
                partial_at(visits, at, x, lo, full_lo, full_hi), dk, dv, k, v, Q, dO,
                q_start, do_start, l_start, d_start, at_q, at_do,
                (b, h, row, j0, M, N), (mask, scores, dropout), c, one, (d, d_v, PRECISION), True,
            )  # fmt: skip
        for x in range(full_lo, full_hi):
            dk, dv = dkdv_step(
                tile_at(visits, at, x), dk, dv, k, v, Q, dO,
                q_start, do_start, l_start, d_start, at_q, at_do,
                (b, h, row, j0, M, N), (mask, scores, dropout), c, one, (d, d_v, PRECISION), False,
            )  # fmt: skip
    store_rows(origin(dK, b, h_k, k0), dK, offsets(dK, B_C, d, BLOCK), j0, N, dk * factor, d)
    store_rows(origin(dV, b, h_k, k0), dV, offsets(dV, B_C, d_v, BLOCK_V), j0, N, dv, d_v)


@triton.jit
def dq_step(
    t, dq, q, do, L, D, K, V, k_start, v_start, at_k, at_v, where, values, c, one,
    S_: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile's share of dQ."""
    b, h, row, i0, N, shift = where
    B_R: tl.constexpr = q.shape[0]
    B_C: tl.constexpr = at_k.shape[0]
    j0 = t * B_C
    k = load_rows(k_start, K, at_k, j0, N, S_[0], MASKED)  # (B_c, d)
    v = load_rows(v_start, V, at_v, j0, N, S_[1], MASKED)  # (B_c, d_v)
    S = tl.dot(q, k.T, input_precision=S_[2])  # (B_r, B_c)
    dP = tl.dot(do, v.T, input_precision=S_[2])  # (B_r, B_c)
    _, dS = scores_gradient(
        S, dP, L[:, None], D[:, None], (b, h, row, N, shift), values, c,
        i0, tl.arange(0, B_R)[:, None], j0, tl.arange(0, B_C)[None, :], 0, MASKED,
    )  # fmt: skip
    return accumulate(dq, dS, k, one, S_[2])


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dq(
    Q, K, V, dO, L, D, dQ, packed, mask, scores, dropout, visits,
    c, factor, one, M, N, H, heads, section, tiles,
    G: tl.constexpr, d: tl.constexpr, d_v: tl.constexpr,
    B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries: the forward's walk with the gradient in place of the output."""
    bh, t = assign(tl.program_id(0), tiles, heads, section)
    b, h = bh // H, bh % H
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = t * B_R
    if i0 >= M:
        return
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(d))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(d_v))
    at_q = offsets(Q, B_R, d, BLOCK)
    q = load_rows(origin(Q, b, h, q0), Q, at_q, i0, M, d, True)  # (B_r, d)
    do = load_rows(origin(dO, b, h, q0), dO, offsets(dO, B_R, d_v, BLOCK_V), i0, M, d_v, True)  # (B_r, d_v)
    rows = i0 + tl.arange(0, B_R)
    lse = tl.load(origin(L, b, h, q0) + rows, mask=rows < M, other=float("inf"))
    sums = tl.load(origin(D, b, h, q0) + rows, mask=rows < M, other=0.0)
    k_start, v_start = origin(K, b, h // G, k0), origin(V, b, h // G, k0)
    at_k, at_v = offsets(K, B_C, d, BLOCK), offsets(V, B_C, d_v, BLOCK_V)
    acc = tl.zeros([B_R, BLOCK], tl.float32)
    shift = N - M
    at = list_at(visits, b, h, t)
    lo, full_lo, full_hi, hi = key_range(visits, at, mask, b, i0 + shift, tl.minimum(i0 + B_R, M) - 1 + shift, N, B_C)
    for x in range(full_lo, full_hi):
        acc = dq_step(
            tile_at(visits, at, x), acc, q, do, lse, sums, K, V, k_start, v_start, at_k, at_v,
            (b, h, bh, i0, N, shift), (mask, scores, dropout), c, one, (d, d_v, PRECISION), False,
        )  # fmt: skip
    for x in range(full_lo - lo + hi - full_hi):
        acc = dq_step(
            partial_at(visits, at, x, lo, full_lo, full_hi), acc, q, do, lse, sums, K, V, k_start, v_start, at_k, at_v,
            (b, h, bh, i0, N, shift), (mask, scores, dropout), c, one, (d, d_v, PRECISION), True,
        )  # fmt: skip
    store_rows(origin(dQ, b, h, q0), dQ, offsets(dQ, B_R, d, BLOCK), i0, M, acc * factor, d)


@triton.jit(
    do_not_specialize=[
        "L", "D", "dBias", "mask", "scores", "dropout", "M", "N", "H", "rows", "columns", "heads", "tiles_r", "tiles_c",
        "b_each", "h_each", "r_each", "c_each",
    ]
)  # fmt: skip
def dbias(
    Q, K, V, dO, L, D, dBias, mask, scores, dropout, c, M, N, H, rows, columns, heads, tiles_r, tiles_c,
    b_each, h_each, r_each, c_each,
    WHICH: tl.constexpr, ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, G: tl.constexpr, d: tl.constexpr,
    d_v: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of score WHICH, a bias: one program owns a tile of it and sums what the bias was broadcast over.

    The bias has `heads` heads, `rows` rows and `columns` columns. Each of its tiles serves b_each batch entries, h_each
    heads, and r_each by c_each tiles of S. No atomics, so its bits repeat.
    """
    program = tl.program_id(0)
    t_c, t_r = program % tiles_c, program // tiles_c % tiles_r
    h0, b0 = program // tiles_c // tiles_r % heads, program // tiles_c // tiles_r // heads
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(d))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(d_v))
    i_in, j_in = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    acc = tl.zeros([B_R, B_C], tl.float32)
    for x in range(b_each * h_each * r_each * c_each):
        i0, j0 = (t_r + x // c_each % r_each) * B_R, (t_c + x % c_each) * B_C
        h, b = h0 + x // c_each // r_each % h_each, b0 + x // c_each // r_each // h_each
        q = load_rows(origin(Q, b, h, 0), Q, offsets(Q, B_R, d, BLOCK), i0, M, d, True)  # (B_r, d)
        do = load_rows(origin(dO, b, h, 0), dO, offsets(dO, B_R, d_v, BLOCK_V), i0, M, d_v, True)  # (B_r, d_v)
        k = load_rows(origin(K, b, h // G, 0), K, offsets(K, B_C, d, BLOCK), j0, N, d, True)  # (B_c, d)
        v = load_rows(origin(V, b, h // G, 0), V, offsets(V, B_C, d_v, BLOCK_V), j0, N, d_v, True)  # (B_c, d_v)
        i = i0 + tl.arange(0, B_R)
        lse = tl.load(origin(L, b, h, 0) + i, mask=i < M, other=float("inf"))
        sums = tl.load(origin(D, b, h, 0) + i, mask=i < M, other=0.0)
        S = tl.dot(q, k.T, input_precision=PRECISION)  # (B_r, B_c)
        dP = tl.dot(do, v.T, input_precision=PRECISION)  # (B_r, B_c)
        _, dS = scores_gradient(
            S, dP, lse[:, None], sums[:, None], (b, h, b * H + h, N, N - M), (mask, scores, dropout), c,
            i0, i_in, j0, j_in, WHICH + 1, True,
        )  # fmt: skip
        acc += dS
    if ONE_ROW:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), acc.shape)
    if ONE_COLUMN:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), acc.shape)
    i, j = t_r * B_R + i_in, t_c * B_C + j_in
    at = origin(dBias, b0, h0, 0) + i.to(tl.int64) * dBias.row + j.to(tl.int64) * dBias.entry
    tl.store(at, acc.to(dBias.ptr.dtype.element_ty), mask=(i < rows) & (j < columns))
