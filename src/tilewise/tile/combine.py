"""Combine partial sums, which programs leave of rows whose keys they split (FlashDecoding, Dao et al. 2023).

A program leaves at most two: of its first tile of rows, and of its last. With a CHUNK every piece of CHUNK keys leaves
one. They are added in the order of keys.
"""

import triton
import triton.language as tl

from .blocks import width
from .cache import keys_of, queries_of
from .line import line_of, owner_of, pick
from .masks import key_range_of
from .softmax import finalize, join_sink


@triton.jit
def address(X, b, rows, heads):
    """Return the addresses of rows and heads, one each."""
    return X.ptr + (b.to(tl.int64) * X.batch + rows.to(tl.int64) * X.row + heads.to(tl.int64) * X.head)


@triton.jit
def places_of(row, h, M, split: tl.constexpr):
    """Return the queries and heads of rows of key head h, and whether there are such queries."""
    return row // split.G, h * split.G + row % split.G, row < M * split.G


@triton.jit
def write(O, L, acc, m, l, sink, b, rows, heads, seen, entries, d_v: tl.constexpr):
    """Store o and lse of rows whose keys are all summed, from acc (rows, entries), m and l (rows,), all fp32. `entries`
    numbers the columns of acc."""
    if sink is not None:
        m, l, alpha = join_sink(m, l, tl.load(sink + heads).to(tl.float32))
        acc = acc * alpha[:, None]
    inverse, lse = finalize(m, l)
    ptr = address(O, b, rows, heads)[:, None] + entries[None, :]
    inside = seen[:, None] & (entries < d_v)[None, :]
    tl.store(ptr, (acc * inverse[:, None]).to(O.ptr.dtype.element_ty), mask=inside)
    tl.store(address(L, b, rows, heads), lse, mask=seen)


@triton.jit
def partial_at(partial, slot, H_k, h, d_v: tl.constexpr):
    """Return the address of a partial sum, d_v numbers, m and l, of one row or several of a key head."""
    return partial + (slot * H_k + h) * (d_v + 2)


@triton.jit
def store_partial(partial, acc, m, l, batch, q0, row, x, w, H_k, h, seen, entries, split: tl.constexpr):
    """Store a piece's sums: for a CHUNK by row and piece, else in one of the program's two tiles."""
    D_V: tl.constexpr = split.d_v
    slots = slots_of(batch, q0, row, x, w, x == 0, split)
    ptr = partial_at(partial, slots, H_k, h, D_V)
    tl.store(ptr[:, None] + entries[None, :], acc, mask=seen[:, None] & (entries < D_V)[None, :])
    tl.store(ptr + D_V, m, mask=seen)
    tl.store(ptr + D_V + 1, l, mask=seen)


@triton.jit
def slots_of(batch, q0, row, x, w, starts, split: tl.constexpr):
    """Return where the sums of rows (of one row tile) lie that program w, or for a CHUNK piece x, leaves of them."""
    if split.CHUNK > 0:
        most = tl.cdiv(batch.capacity // 2, split.CHUNK) + 1
        return (q0 * split.G + row).to(tl.int64) * most + x
    else:
        return (2 * w + starts.to(tl.int32)).to(tl.int64) * split.B_R + row % split.B_R


@triton.jit(do_not_specialize=["batch", "variant", "H_k", "W"])
def attention_combine(O, L, partial, batch, variant, H_k, W, split: tl.constexpr, B_X: tl.constexpr):
    """Add the partial sums of one row of one query head, B_X at a time, in the order of keys. Other rows are done."""
    G: tl.constexpr = split.G
    D_V: tl.constexpr = split.d_v
    if split.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    line = line_of(batch, variant.mask, W, tl.arange(0, split.B_B), split)
    row, head = tl.program_id(0) // (G * H_k), tl.program_id(0) % (G * H_k)
    B = batch.B // 2
    q_first, m_all = queries_of(batch, tl.minimum(line.sequences, B - 1))
    b = tl.sum(((q_first + m_all <= row) & (line.sequences < B)).to(tl.int32), 0)
    b_real = tl.minimum(b, B - 1)
    q0, M = queries_of(batch, b_real)
    i = row - q0
    y = i * G + head % G
    each = pick(line, line.each, b)
    place = pick(line, line.end - line.tiles * line.each, b) + y // split.B_R * each
    first, parts = 0, each
    if split.CHUNK == 0:
        first = owner_of(line, place)
        parts = owner_of(line, place + each - 1) - first + 1
    sums = (b < B) & (i >= 0) & (i < M) & (parts > 1)
    _, N = keys_of(batch, b_real)
    lo, _ = key_range_of(variant.mask, b_real, N - M, N)
    # groups of chunks begin at the same keys, wherever this call's queries begin
    skip = lo // split.CHUNK % B_X if split.CHUNK > 0 else 0
    BLOCK: tl.constexpr = width(tl.float32, D_V)
    entries = tl.arange(0, BLOCK)
    if split.HOPPER and (sums | (tl.program_id(0) == 0)):  # one waits anyway, so that this ends after attention_decode
        tl.extra.cuda.gdc_wait()
    if not sums:
        return
    acc = tl.zeros([1, BLOCK], tl.float32)
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    for x0 in range(-skip, parts, B_X):
        x = x0 + tl.arange(0, B_X)
        there = (x >= 0) & (x < parts)
        slots = slots_of(batch, q0, y, x, first + x, x == 0, split)
        ptr = partial_at(partial, slots, H_k, head // G, D_V)
        m_x = tl.load(ptr + D_V, mask=there, other=float("-inf"))
        l_x = tl.load(ptr + D_V + 1, mask=there, other=0.0)
        part = tl.load(ptr[:, None] + entries[None, :], mask=there[:, None] & (entries < D_V)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(m_x, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight, alpha = tl.exp2(m_x - shift), tl.exp2(m - shift)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, None], 0)[None, :]
        l, m = l * alpha + tl.sum(l_x * weight, 0), m_new
    of_rows = b if batch.cu_q is None else b * 0
    rows = tl.zeros([1], tl.int32) + (i if batch.cu_q is None else row)
    heads = tl.zeros([1], tl.int32) + head
    write(O, L, acc, m, l, variant.sink, of_rows, rows, heads, heads >= 0, entries, D_V)
