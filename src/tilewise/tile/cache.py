"""Locate queries and keys where rows of several lengths lie in a batch, in a pack, in a cache or in its pages."""

from typing import NamedTuple

import triton
import triton.language as tl


class Batch(NamedTuple):
    """Describe a batch by tensors, each of them None where it does not differ: cu_q (B + 1,), lengths (B,), starts
    (B,), index (B,), and the table (entries, width) with its stride. Host integers are given as 2 n + 1 (see
    `rows.Packed`): how many sequences, queries of each, rows of q in all, and rows of an entry; the least and the most
    queries of a packed sequence that counts, or None."""

    cu_q: object
    lengths: object
    starts: object
    index: object
    table: object
    width: object
    B: object
    M: object
    rows: object
    capacity: object
    least: object = None
    most: object = None


class Keys(NamedTuple):
    """Locate one sequence's keys: its row of the table, or its entry of a contiguous cache; the row of key 0, or None
    if it is 0; and the keys [first, last) that a tile of rows sees."""

    table: object
    entry: object
    start: object
    first: object
    last: object


class Scales(NamedTuple):
    """Hold what 8-bit keys and values are multiplied by, fp32, one a (sequence, head) by strides."""

    k: object
    k_batch: object
    k_head: object
    v: object
    v_batch: object
    v_head: object


@triton.jit
def queries_of(batch, b):
    """Return the first row in q, and the number of queries, of sequence b or of each of sequences b."""
    if batch.cu_q is None:
        return b * (batch.M // 2), b * 0 + batch.M // 2
    else:
        total = batch.rows // 2
        start = tl.minimum(tl.maximum(tl.load(batch.cu_q + b), 0), total)
        count = tl.minimum(tl.maximum(tl.load(batch.cu_q + b + 1), start), total) - start
        if batch.least is not None:
            count = tl.where(count < batch.least // 2, 0, count)
        if batch.most is not None:
            count = tl.where(count > batch.most // 2, 0, count)
        return start, count


@triton.jit
def keys_of(batch, b):
    """Return the row of key 0 in the cache, and the number of keys, of sequence b or of each of sequences b."""
    end = b * 0 + batch.capacity // 2
    if batch.lengths is not None:
        end = tl.minimum(end, tl.load(batch.lengths + b))
    start = b * 0
    if batch.starts is not None:
        start = tl.maximum(tl.load(batch.starts + b), 0)
    return start, tl.maximum(end - start, 0)


@triton.jit
def entry_of(batch, b):
    """Return the entry of sequence b in a contiguous cache, or its row of the table."""
    if batch.index is None:
        return b.to(tl.int64)
    else:
        return tl.load(batch.index + b).to(tl.int64)


@triton.jit
def load_keys(X, h, keys, t, P: tl.constexpr, d: tl.constexpr, B_C: tl.constexpr, BLOCK: tl.constexpr,
              CHECK: tl.constexpr, start: tl.constexpr = 0):  # fmt: skip
    """Load the rows of key tile t from entry `start` on, zero past the head size. With CHECK, keys that no row sees are
    zero, and neither they nor their entries of the table are read. # (B_C, BLOCK)

    P is the size of a page, 0 without pages. A tile inside one page costs one look-up.
    """
    j = t * B_C + tl.arange(0, B_C)
    inside = (j >= keys.first) & (j < keys.last)
    head = X.ptr + h.to(tl.int64) * X.head
    if P == 0:
        row = tl.cast(t * B_C if keys.start is None else keys.start + t * B_C, tl.int64) * X.row
        ptr = (head + keys.entry * X.batch + row) + (tl.arange(0, B_C).to(tl.int64) * X.row)[:, None]
    elif P % B_C == 0 and keys.start is None:
        page = tl.load(keys.table + t * B_C // P).to(tl.int64)
        row = tl.cast(t * B_C % P, tl.int64) * X.row
        ptr = (head + page * X.batch + row) + (tl.arange(0, B_C).to(tl.int64) * X.row)[:, None]
    else:
        rows = j if keys.start is None else keys.start + j
        if CHECK:
            page = tl.load(keys.table + rows // P, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(keys.table + rows // P).to(tl.int64)
        ptr = head + (page * X.batch + (rows % P).to(tl.int64) * X.row)[:, None]
    entries = start + tl.arange(0, BLOCK)
    exists = tl.full([1, BLOCK], 1, tl.int1)
    if d < start + BLOCK:
        exists = (entries < d)[None, :]
    if CHECK:
        exists = exists & inside[:, None]
    return tl.load(ptr + entries[None, :], mask=exists, other=0.0)


@triton.jit
def scale_of(scale, b, h, batch, head):
    """Return the factor of a sequence's key head."""
    return tl.load(scale + b.to(tl.int64) * batch + h.to(tl.int64) * head)
