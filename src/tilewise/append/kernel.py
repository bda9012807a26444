"""Write new keys and values into a cache, and q into a new tensor, with rotary applied to keys and q: a program takes
some heads of one token."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..rotary.kernel import load_pairs, store_pairs
from ..tile.cache import entry_of, queries_of


class New(NamedTuple):
    """Hold the constants: head sizes, pairs that have an angle, rows of a page or 0, how pairs lie, and sizes of
    blocks: heads, pairs, entries without an angle, entries of a value, sequences."""

    d: int
    d_v: int
    pairs: int
    P: int
    INTERLEAVED: bool
    B_H: int
    B_P: int
    B_REST: int
    B_V: int
    B_B: int


class Rotary(NamedTuple):
    """Hold cosines and sines, (positions, pairs) by strides, or None; and how many positions there are, as 2 n + 1."""

    cos: object
    sin: object
    cos_row: object
    sin_row: object
    positions: object


@triton.jit
def sequence_of_row(batch, t, B_B: tl.constexpr):
    """Return the sequence of row t of q, and the row's index in it. Rows after the last sequence belong to B, and those
    before the first have an index below 0."""
    if batch.cu_q is None:
        M = batch.M // 2
        return t // M, t % M
    else:
        count = batch.B // 2
        b = tl.minimum(tl.arange(0, B_B), count - 1)
        first, m = queries_of(batch, b)
        before = (first + m <= t) & (tl.arange(0, B_B) < count)
        found = tl.sum(before.to(tl.int32), 0)
        start, _ = queries_of(batch, tl.minimum(found, count - 1))
        return found, t - start


@triton.jit
def narrowed(x, scale, dtype: tl.constexpr):
    """Return x in the cache's type; with a scale, x / scale, saturated at e4m3's largest number."""
    if scale is not None:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def move(X, Y, rotary, row, valid, scale, new: tl.constexpr):  # X, Y (B_H,) addresses of heads
    """Store the heads at X to Y, with their first pairs rotated by a row of the tables."""
    R: tl.constexpr = new.pairs
    D: tl.constexpr = new.d
    B_P: tl.constexpr = new.B_P
    B_REST: tl.constexpr = new.B_REST
    INTERLEAVED: tl.constexpr = new.INTERLEAVED
    dtype: tl.constexpr = Y.dtype.element_ty
    X, Y, valid = X[None, :, None], Y[None, :, None], valid[None, :, None]
    if R > 0:
        p = tl.arange(0, B_P).to(tl.int64)
        c = tl.load(rotary.cos + row * rotary.cos_row + p, mask=p < R, other=0.0).to(tl.float32)[None, None, :]
        s = tl.load(rotary.sin + row * rotary.sin_row + p, mask=p < R, other=0.0).to(tl.float32)[None, None, :]
        x_0, x_1 = load_pairs(X, p, R, 1, valid, INTERLEAVED)
        kind: tl.constexpr = X.dtype.element_ty
        x_0, x_1 = x_0.to(tl.float32), x_1.to(tl.float32)
        y_0, y_1 = (x_0 * c - x_1 * s).to(kind), (x_1 * c + x_0 * s).to(kind)
        store_pairs(Y, narrowed(y_0, scale, dtype), narrowed(y_1, scale, dtype), p, R, valid, INTERLEAVED)
    if B_REST > 0:
        d = (2 * R + tl.arange(0, B_REST).to(tl.int64))[None, None, :]
        rest = valid & (d < D)
        tl.store(Y + d, narrowed(tl.load(X + d, mask=rest), scale, dtype), mask=rest)


@triton.jit(do_not_specialize=["batch", "turn", "H", "H_k", "entries", "pages"])
def cache_append(Q, Y, K_new, V_new, K, V, batch, turn, scales, H, H_k, entries, pages, new: tl.constexpr):
    """Rotate some heads of q to Y, or write some heads of a new key and value to their row of the cache.

    All operands are `Rows`; Q and Y may be None. A key whose row its sequence does not have is dropped, and so is one
    whose entry, or row of the table, is none of `entries`, or whose page is none of `pages`.
    """
    B_H: tl.constexpr = new.B_H
    B_V: tl.constexpr = new.B_V
    B_B: tl.constexpr = new.B_B
    P: tl.constexpr = new.P
    of_q = 0 if Q is None else tl.cdiv(H, B_H)
    blocks = of_q + tl.cdiv(H_k, B_H)
    t, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    found, i = sequence_of_row(batch, t, B_B)
    there = (found < batch.B // 2) & (i >= 0)
    b = tl.minimum(found, batch.B // 2 - 1)
    _, m = queries_of(batch, b)
    r = tl.load(batch.lengths + b) - m + i
    row = 0
    if turn is not None:
        row = tl.minimum(tl.maximum(tl.where(there, r, 0), 0), turn.positions // 2 - 1).to(tl.int64)
    of_rows = b.to(tl.int64) if batch.cu_q is None else b.to(tl.int64) * 0
    at = (i if batch.cu_q is None else t).to(tl.int64)
    if block < of_q:
        if Q is not None:
            h = block * B_H + tl.arange(0, B_H).to(tl.int64)
            X = Q.ptr + of_rows * Q.batch + at * Q.row + h * Q.head
            move(X, Y.ptr + of_rows * Y.batch + at * Y.row + h * Y.head, turn, row, h < H, None, new)
        return
    least = 0 if batch.starts is None else tl.maximum(tl.load(batch.starts + b), 0)
    if there & (r >= least) & (r < batch.capacity // 2):
        h = (block - of_q) * B_H + tl.arange(0, B_H).to(tl.int64)
        entry, place = entry_of(batch, b), r.to(tl.int64)
        exists = (entry >= 0) & (entry < entries)
        if P > 0:
            entry = tl.load(batch.table + entry * (batch.width // 2) + r // P, mask=exists, other=-1).to(tl.int64)
            exists = (entry >= 0) & (entry < pages)
            place = (r % P).to(tl.int64)
        written = (h < H_k) & exists
        k_scale = None if scales is None else tl.load(scales.k + b.to(tl.int64) * scales.k_batch + h * scales.k_head,
                                                      mask=h < H_k, other=1.0)[None, :, None]  # fmt: skip
        v_scale = None if scales is None else tl.load(scales.v + b.to(tl.int64) * scales.v_batch + h * scales.v_head,
                                                      mask=h < H_k, other=1.0)[:, None]  # fmt: skip
        X = K_new.ptr + of_rows * K_new.batch + at * K_new.row + h * K_new.head
        move(X, K.ptr + entry * K.batch + place * K.row + h * K.head, turn, row, written, k_scale, new)
        d = tl.arange(0, B_V).to(tl.int64)[None, :]
        valid = written[:, None] & (d < new.d_v)
        X = V_new.ptr + of_rows * V_new.batch + at * V_new.row + h * V_new.head
        x = narrowed(tl.load(X[:, None] + d, mask=valid), v_scale, V.ptr.dtype.element_ty)
        tl.store((V.ptr + entry * V.batch + place * V.row + h * V.head)[:, None] + d, x, mask=valid)
