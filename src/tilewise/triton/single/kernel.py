"""Forward and backward of heads whose score matrix is a single tile, such as Swin's windows: one kernel each.

A program takes a key head's group in some batch entries, one after the other. As its tile has whole rows, the softmax
needs no rescaling, and the backward no row values of other kernels (Dao et al. 2022, algorithm 4, with T_r = T_c = 1).
Tensors of scores that learn are summed over the batch entries in registers; what each entry reads for itself is stored.
"""
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.blocks import block, dot, load_rows, store_rows
from ...tile.dropout import dropout_mask
from ...tile.gather import entry_gradients, reduced, store_by_index
from ...tile.gradients import seen
from ...tile.ranges import Place
from ...tile.renormalize import is_large
from ...tile.scores import Entries, apply_scores, finite, scores_backward
from ...tile.softmax import LOG2E, finalize, for_backward, join_sink, online_softmax, probabilities


class Learned(NamedTuple):
    """Hold what a tensor that learns needs: how a score reads it, where its sums lie, and how many entries that rows
    and columns index, as 2 n + 1."""

    sums: object
    rows: object
    columns: object
    gather: object


class RowValues(NamedTuple):
    """Address numbers of rows, (B, H, M): lse, its gradient or None, and where delta is stored or None."""

    lse: object
    dlse: object
    delta: object


class Work(NamedTuple):
    """Divide batch entries into `parts`, one for each program of a key head. Counts are 2 n + 1."""

    batch: object
    parts: object


@triton.jit
def as_product(T, dtype: tl.constexpr):
    """Return T as the sum of a product of zeros. Triton 3.6 else gives the softmax the layout of a bias's loads: 3,535
    instructions a tile of Swin where these are 802."""
    return tl.dot(tl.zeros([T.shape[0], 16], dtype), tl.zeros([16, T.shape[1]], dtype), T)


@triton.jit
def logits_of_head(q, k, place, variant, PRECISION: tl.constexpr):  # (B_r, d), (B_c, d)
    """Return S = Q K^T, and the logits after the scores, -inf where the mask hides a key."""
    S = dot(q, k.T, PRECISION)
    i, j = tl.arange(0, S.shape[0])[:, None], tl.arange(0, S.shape[1])[None, :]
    T = apply_scores(variant.scores, S, Entries(place.b, place.h, i + place.shift, 0, 0, j), len(variant.scores))
    if len(variant.scores) > 0:
        T = as_product(T, q.dtype)
    return S, tl.where(seen(place, variant, i, 0, j) & (i < place.M), T, float("-inf"))


@triton.jit
def drop(x, place, variant):
    """Return what dropout leaves of a score matrix."""
    if variant.dropout is not None:
        i, j = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
        x *= dropout_mask(variant.dropout, place, place.i0, i, 0, j)
    return x


@triton.jit
def own_batch(work):
    """Return the key head of a program, its part of the batch entries, the first of them, and how many there are."""
    B, parts = work.batch >> 1, work.parts >> 1
    part, each = tl.program_id(0) % parts, tl.cdiv(B, parts)
    return tl.program_id(0) // parts, part, part * each, tl.minimum(each, B - part * each)


@triton.jit(do_not_specialize=["variant", "M", "N", "H_k", "work"])
def attention_forward_single(Q, K, V, O, L, variant, c, M, N, H_k, work, tile: tl.constexpr):
    """Compute O and L of a key head's group in some batch entries."""
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    h_k, _part, b0, count = own_batch(work)
    rows = tl.arange(0, B_R)
    for x in range(count):
        b = b0 + x
        k = load_rows(block(K, b, h_k, 0, B_C, d), 0, N, True)
        v = load_rows(block(V, b, h_k, 0, B_C, d_v), 0, N, True)
        for g in range(G):
            h = h_k * G + g
            place = Place(b, h, b * (H_k * G) + h, 0, M, N, N - M)
            q = load_rows(block(Q, b, h, 0, B_R, d), 0, M, True)
            _S, T = logits_of_head(q, k, place, variant, PRECISION)
            m, l = tl.full([B_R], float("-inf"), tl.float32), tl.zeros([B_R], tl.float32)
            P, _alpha, m, l = online_softmax(T, m, l, c)
            if variant.sink is not None:
                m, l, alpha = join_sink(m, l, tl.load(variant.sink + h).to(tl.float32), c is None)
                P *= alpha[:, None]
            inverse, lse = finalize(m, l, c is None)
            o = dot(drop(P, place, variant).to(v.dtype), v, PRECISION) * inverse[:, None]
            store_rows(block(O, b, h, 0, B_R, d_v), 0, M, o)
            tl.store(L + place.matrix.to(tl.int64) * M + rows, lse, mask=rows < M)


@triton.jit
def probabilities_of_head(T, lse, unit, EXACT: tl.constexpr):
    """Return P = exp(T - lse). Without a unit, lse may be so large that it lacks log l (tile/renormalize.py): then P is
    divided by its sums."""
    if unit is None:
        P = tl.exp2((T - finite(lse)[:, None]) * LOG2E)
        l = tl.sum(P, 1)
        return P * tl.where(is_large(lse) & (l > 0.0), 1.0 / l, 1.0)[:, None]
    else:
        return probabilities(T, for_backward(lse, EXACT)[:, None], unit, EXACT)


@triton.jit
def gradients_of_head(q, k, v, do, o, rows, place, variant, unit, PRECISION: tl.constexpr):
    """Return S = Q K^T, the logits after the scores, P after dropout, and the logits' gradient; store delta, if it is
    wanted. # (B_r, B_c)"""
    S, T = logits_of_head(q, k, place, variant, PRECISION)
    own = tl.arange(0, S.shape[0])
    at = place.matrix.to(tl.int64) * place.M + own
    lse = tl.load(rows.lse + at, mask=own < place.M, other=0.0)
    P = probabilities_of_head(T, lse, unit, q.dtype == tl.float32)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if rows.dlse is not None:
        delta -= tl.load(rows.dlse + at, mask=own < place.M, other=0.0)
    if rows.delta is not None:
        tl.store(rows.delta + at, delta, mask=own < place.M)
    dP = drop(dot(do, v.T, PRECISION), place, variant)
    return S, T, drop(P, place, variant), P * (dP - delta[:, None])


@triton.jit
def with_entries(sums, S, T, dT, place, variant, learned, ways: tl.constexpr):
    """Return the sums of what learns, with what a score matrix adds; store what is of one batch entry alone."""
    i, j = tl.arange(0, S.shape[0])[:, None], tl.arange(0, S.shape[1])[None, :]
    at = Entries(place.b, place.h, i + place.shift, 0, 0, j)
    added = ()
    for n in tl.static_range(len(ways)):
        after = scores_backward(variant.scores, dT, S, T, at, ways[n][0] + 1)
        entries = entry_gradients(S, after, place, i, 0, j, variant, learned[n].gather, ways[n][0])
        if ways[n][4]:
            to = learned[n].sums
            first = place.b.to(tl.int64) * (to.batch >> 1) + place.h.to(tl.int64) * (to.head >> 1)
            store_learned(entries, learned[n], first, ways, n)
            added += (sums[n],)
        else:
            added += (sums[n] + entries,)
    return added


@triton.jit
def store_learned(entries, own, first, ways: tl.constexpr, n: tl.constexpr):
    """Store what tensor n gets, summed over rows and columns that share an entry."""
    store_by_index(reduced(entries, ways[n][2], ways[n][3]), own.sums, first, 0, 0, own.rows, own.columns)


@triton.jit(do_not_specialize=["variant", "learned", "factors", "M", "N", "H_k", "work"])
def attention_backward_single(
    Q, K, V, O, rows, dO, gradients, variant, learned, factors, M, N, H_k, work, ways: tl.constexpr, tile: tl.constexpr
):
    """Compute `gradients`, which are dQ, dK and dV, of a key head's group in some batch entries, and sums of what
    learns over these.

    `ways` says of each tensor that learns which score reads it, and whether heads, rows, columns and batch entries read
    entries of their own. (Fields of a tuple inside would get lost.)
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    h_k, part, b0, count = own_batch(work)
    i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    sums = ()
    for _ in tl.static_range(len(ways)):
        sums += (tl.zeros([B_R, B_C], tl.float32),)
    for x in range(count):
        b = b0 + x
        keys, values = block(K, b, h_k, 0, B_C, d), block(V, b, h_k, 0, B_C, d_v)
        k, v = load_rows(keys, 0, N, True), load_rows(values, 0, N, True)
        dk, dv = tl.zeros(keys.at.shape, tl.float32), tl.zeros(values.at.shape, tl.float32)
        for g in range(G):
            h = h_k * G + g
            q = load_rows(block(Q, b, h, 0, B_R, d), 0, M, True)
            do = load_rows(block(dO, b, h, 0, B_R, d_v), 0, M, True)
            o = load_rows(block(O, b, h, 0, B_R, d_v), 0, M, True)
            place = Place(b, h, b * (H_k * G) + h, 0, M, N, N - M)
            S, T, P, dT = gradients_of_head(q, k, v, do, o, rows, place, variant, factors.unit, PRECISION)
            sums = with_entries(sums, S, T, dT, place, variant, learned, ways)
            dS = scores_backward(variant.scores, dT, S, T, Entries(b, h, i + place.shift, 0, 0, j), 0)
            P, dS = P.to(q.dtype), dS.to(q.dtype)
            dv += dot(P.T, do, PRECISION)
            dk += dot(dS.T, q, PRECISION)
            dq = dot(dS, k, PRECISION)
            store_rows(block(gradients[0], b, h, 0, B_R, d), 0, M, dq * factors.scale)
        store_rows(block(gradients[1], b, h_k, 0, B_C, d), 0, N, dk * factors.scale)
        store_rows(block(gradients[2], b, h_k, 0, B_C, d_v), 0, N, dv)
    for n in tl.static_range(len(ways)):
        if not ways[n][4]:
            to = learned[n].sums
            first = tl.program_id(0).to(tl.int64) * (to.part >> 1)
            if ways[n][1]:
                first = part.to(tl.int64) * (to.part >> 1) + h_k.to(tl.int64) * (to.head >> 1)
            store_learned(sums[n], learned[n], first, ways, n)
