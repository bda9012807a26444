"""The backward kernels: delta; then dK and dV, one program per key tile; and dQ, one program per query tile.

S and P are recomputed from lse (Dao et al. 2022, algorithm 4). There are no atomics: no kernel adds to memory that
another one wrote.
"""
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl

from ..tile.blocks import block, load_row_values, load_rows, store_rows
from ..tile.factors import (
    left_slices,
    load_stationary,
    load_streamed,
    load_values,
    product,
    stationary_axis,
    tile_product,
)
from ..tile.gradients import scores_gradient
from ..tile.ranges import Place, key_range, list_at, partial_at, query_range, tile_at
from ..tile.rows import fill_unused, pitch, row_values, rows_of
from ..tile.schedule import assign, counts
from ..tile.softmax import for_backward

# lengths, and numbers that follow from them; inside NamedTuples, Triton still specializes on multiples of 16
NOT_SPECIALIZED = ["packed", "variant", "factors", "M", "N", "schedule"]


@triton.jit(do_not_specialize=["packed", "unused", "M", "H", "tiles"])
def attention_backward_delta(O, dO, dL, lse, L, D, packed, unused, M, H, tiles, d_v: tl.constexpr, B_R: tl.constexpr):
    """Compute two values per row for the other kernels: L, the lse in their base, and D = rowsum(dO * O) - dL.

    Also write zeros to gradient rows outside all packed sequences. dL, the gradient of lse, may be None.
    """
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    i0 = t * B_R
    if i0 >= M:
        return
    o = load_rows(block(O, b, h, q0, B_R, d_v), i0, M, True).to(tl.float32)
    do = load_rows(block(dO, b, h, q0, B_R, d_v), i0, M, True).to(tl.float32)
    rows = i0 + tl.arange(0, B_R)
    delta = tl.sum(o * do, 1)  # (B_r,)
    if dL is not None:
        delta -= tl.load(row_values(dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
    logs = tl.load(row_values(lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M)
    logs = for_backward(logs, O.ptr.dtype.element_ty == tl.float32)
    stride = pitch(rows_in_all)
    tl.store(row_values(L, packed, b, h, H, q0, stride) + rows, logs, mask=rows < M)
    tl.store(row_values(D, packed, b, h, H, q0, stride) + rows, delta, mask=rows < M)


@triton.jit
def accumulate(acc, a, b, one, PRECISION: tl.constexpr):
    """Return acc + a b. In fp32, each tile has a new sum, added by FMA: matrix units truncate as they accumulate."""
    if b[0].dtype == tl.float32:
        return tl.fma(product(a, b, PRECISION), one, acc)
    else:
        return tl.dot(a[0].to(b[0].dtype), b[0], acc)


@triton.jit
def dkdv_step(dk, dv, k, v, Q, dO, L, D, place, variant, j0, factors, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add one query tile's contribution to dK and dV. S is transposed, (B_c, B_r); on FMA units it is (B_r, B_c)."""
    B_R: tl.constexpr = Q.at.shape[0]
    B_C: tl.constexpr = dk.shape[0]
    dtype: tl.constexpr = Q.start.dtype.element_ty
    STATIONARY: tl.constexpr = stationary_axis(dtype, PRECISION)
    q = load_streamed(Q, place.i0, place.M, MASKED, PRECISION)
    do = load_streamed(dO, place.i0, place.M, MASKED, PRECISION)
    logs = load_row_values(L, place.i0, B_R, place.M, float("inf"), MASKED)  # exp(S - inf) = 0 for rows past the end
    delta = load_row_values(D, place.i0, B_R, place.M, 0.0, MASKED)
    S, dP = tile_product(k, q, PRECISION), tile_product(v, do, PRECISION)
    i, j = tl.expand_dims(tl.arange(0, B_R), STATIONARY), tl.expand_dims(tl.arange(0, B_C), 1 - STATIONARY)
    logs, delta = tl.expand_dims(logs, STATIONARY), tl.expand_dims(delta, STATIONARY)
    EXACT: tl.constexpr = dtype == tl.float32
    P, dS = scores_gradient(S, dP, logs, delta, place, variant, factors.unit, i, j0, j, EXACT, MASKED, 0)
    if STATIONARY == 1:
        P, dS = P.T, dS.T
    P, dS = left_slices(P, dtype, PRECISION), left_slices(dS, dtype, PRECISION)
    q = load_values(Q, place.i0, place.M, MASKED, PRECISION)  # (B_r, d)
    do = load_values(dO, place.i0, place.M, MASKED, PRECISION)  # (B_r, d_v)
    return accumulate(dk, dS, q, factors.one, PRECISION), accumulate(dv, P, do, factors.one, PRECISION)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "H_k"])
def attention_backward_dkdv(
    Q, K, V, dO, scratch, dK, dV, packed, variant, factors, M, N, H_k, schedule, tile: tl.constexpr
):
    """Compute dK and dV of one key tile: loop over its group of query heads and the query tiles that see it."""
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    tiles, heads, section = counts(schedule)
    matrix, reversed_t = assign(tl.program_id(0), tiles, heads, section)
    t = tiles - 1 - reversed_t  # the first keys are seen by the most queries
    b, h_k = matrix // H_k, matrix % H_k
    stride = pitch(M)
    q0, M, k0, N = rows_of(packed, b, M, N)
    j0 = t * B_C
    if j0 >= N:
        return
    keys, values = block(K, b, h_k, k0, B_C, d), block(V, b, h_k, k0, B_C, d_v)
    k, v = load_stationary(keys, j0, N, PRECISION), load_stationary(values, j0, N, PRECISION)
    dk, dv = tl.zeros(keys.at.shape, tl.float32), tl.zeros(values.at.shape, tl.float32)
    for g in range(G):
        h = h_k * G + g
        queries, gradients = block(Q, b, h, q0, B_R, d), block(dO, b, h, q0, B_R, d_v)
        logs = row_values(scratch.logs, packed, b, h, H_k * G, q0, stride)
        delta = row_values(scratch.delta, packed, b, h, H_k * G, q0, stride)
        lists = list_at(variant.lists, b, h, t)
        lo, full_lo, full_hi, hi = query_range(variant, lists, b, j0, M, N, B_R, B_C)
        for x in range(full_lo - lo + hi - full_hi):
            i0 = partial_at(variant.lists, lists, x, lo, full_lo, full_hi) * B_R
            place = Place(b, h, b * (H_k * G) + h, i0, M, N, N - M)
            dk, dv = dkdv_step(
                dk, dv, k, v, queries, gradients, logs, delta, place, variant, j0, factors, True, PRECISION
            )  # fmt: skip
        for x in range(full_lo, full_hi):
            i0 = tile_at(variant.lists, lists, x) * B_R
            place = Place(b, h, b * (H_k * G) + h, i0, M, N, N - M)
            dk, dv = dkdv_step(
                dk, dv, k, v, queries, gradients, logs, delta, place, variant, j0, factors, False, PRECISION
            )  # fmt: skip
    store_rows(block(dK, b, h_k, k0, B_C, d), j0, N, dk * factors.scale)
    store_rows(block(dV, b, h_k, k0, B_C, d_v), j0, N, dv)


@triton.jit
def dq_step(j0, acc, q, do, logs, delta, K, V, place, variant, factors, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add one key tile's contribution to dQ."""
    B_R: tl.constexpr = acc.shape[0]
    B_C: tl.constexpr = K.at.shape[0]
    dtype: tl.constexpr = K.start.dtype.element_ty
    STATIONARY: tl.constexpr = stationary_axis(dtype, PRECISION)
    k = load_streamed(K, j0, place.N, MASKED, PRECISION)
    v = load_streamed(V, j0, place.N, MASKED, PRECISION)
    S, dP = tile_product(q, k, PRECISION), tile_product(do, v, PRECISION)
    i, j = tl.expand_dims(tl.arange(0, B_R), 1 - STATIONARY), tl.expand_dims(tl.arange(0, B_C), STATIONARY)
    logs, delta = tl.expand_dims(logs, 1 - STATIONARY), tl.expand_dims(delta, 1 - STATIONARY)
    EXACT: tl.constexpr = dtype == tl.float32
    _, dS = scores_gradient(S, dP, logs, delta, place, variant, factors.unit, i, j0, j, EXACT, MASKED, 0)
    if STATIONARY == 1:
        dS = dS.T
    dS = left_slices(dS, dtype, PRECISION)
    return accumulate(acc, dS, load_values(K, j0, place.N, MASKED, PRECISION), factors.one, PRECISION)


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "H"])
def attention_backward_dq(Q, K, V, dO, scratch, dQ, packed, variant, factors, M, N, H, schedule, tile: tl.constexpr):
    """Compute dQ of one query tile: the forward's loop over key tiles, with dQ in place of O."""
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    tiles, heads, section = counts(schedule)
    matrix, t = assign(tl.program_id(0), tiles, heads, section)
    b, h = matrix // H, matrix % H
    stride = pitch(M)
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = t * B_R
    if i0 >= M:
        return
    place = Place(b, h, matrix, i0, M, N, N - M)
    queries = block(Q, b, h, q0, B_R, d)
    q = load_stationary(queries, i0, M, PRECISION)
    do = load_stationary(block(dO, b, h, q0, B_R, d_v), i0, M, PRECISION)
    logs = load_row_values(row_values(scratch.logs, packed, b, h, H, q0, stride), i0, B_R, M, float("inf"), True)
    delta = load_row_values(row_values(scratch.delta, packed, b, h, H, q0, stride), i0, B_R, M, 0.0, True)
    keys, values = block(K, b, h // G, k0, B_C, d), block(V, b, h // G, k0, B_C, d_v)
    acc = tl.zeros(queries.at.shape, tl.float32)
    lists = list_at(variant.lists, b, h, t)
    lo, full_lo, full_hi, hi = key_range(variant, lists, place, B_R, B_C)
    for x in range(full_lo, full_hi):
        j0 = tile_at(variant.lists, lists, x) * B_C
        acc = dq_step(j0, acc, q, do, logs, delta, keys, values, place, variant, factors, False, PRECISION)
    for x in range(full_lo - lo + hi - full_hi):
        j0 = partial_at(variant.lists, lists, x, lo, full_lo, full_hi) * B_C
        acc = dq_step(j0, acc, q, do, logs, delta, keys, values, place, variant, factors, True, PRECISION)
    store_rows(block(dQ, b, h, q0, B_R, d), i0, M, acc * factors.scale)
