"""Where rows live: the address of a row, and the rows of a batch entry."""

from typing import NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """One operand, (batch, length, heads, size) by its strides, entries side by side; packed: `batch` is 0."""

    ptr: object
    batch: object
    row: object
    head: object


class Packed(NamedTuple):
    """The cu_seqlens of packed sequences."""

    cu_q: object
    cu_k: object


@triton.jit
def rows_of(packed, b, M, N):
    """First row and length of batch entry b's queries, then of its keys.

    M and N are the lengths, or for packed sequences the rows in all: bad cu_seqlens stay inside the tensors.
    """
    if packed is None:
        return 0, M, 0, N
    else:
        q0, m = clamped(packed.cu_q, b, M)
        k0, n = clamped(packed.cu_k, b, N)
        return q0, m, k0, n


@triton.jit
def clamped(cu, b, total):
    """Start and length of sequence b, inside [0, total)."""
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu + b + 1), start), total)
    return start, end - start


@triton.jit
def origin(X, b, h, row):
    """Address of row `row` of head h of batch entry b; 64-bit."""
    return X.ptr + (b.to(tl.int64) * X.batch + h.to(tl.int64) * X.head + tl.cast(row, tl.int64) * X.row)


@triton.jit
def row_values(x, packed, b, h, H, q0, stride):
    """Address of the numbers that go with head h's rows, one a row: (B, H, stride), or packed (H, stride)."""
    if packed is None:
        return x + (b.to(tl.int64) * H + h) * stride
    else:
        return x + h.to(tl.int64) * stride + q0


@triton.jit
def pitch(M):
    """The stride of row values in scratch: M, rounded up so that every head's first lies on a 64-byte boundary."""
    return (M + 15) // 16 * 16
