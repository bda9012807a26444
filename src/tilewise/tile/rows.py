"""Address rows: return where a row lies, and which rows a batch entry has."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

FILL_PROGRAMS = tl.constexpr(512)
"""Limits the programs that fill rows of no sequence to the first wave of a launch, whose wait for memory hides
theirs."""


class Rows(NamedTuple):
    """Describe one operand, (batch, length, heads, size), by its strides; entries are adjacent. For packed sequences
    `batch` is 0."""

    ptr: object
    batch: object
    row: object
    head: object


class RowValues(NamedTuple):
    """Hold what the backward knows of each row: lse, in the unit of its logits, and delta = rowsum(dO * O) - dL."""

    logs: Any
    delta: Any


class Packed(NamedTuple):
    """Hold the cu_seqlens of packed sequences, and the longest lengths. Host integers are given as 2 n + 1, since
    Triton would compile again for multiples of 16."""

    cu_q: object
    cu_k: object
    max_q: object
    max_k: object


class Output(NamedTuple):
    """Describe an output of packed sequences by its strides, its heads and its head size, the last two as 2 n + 1."""

    X: Rows
    heads: object
    size: object


class Unused(NamedTuple):
    """Hold what is filled in rows outside all sequences: outputs with rows for queries, those with rows for keys, and
    lse or None. Counts are 2 n + 1, as in `Packed`."""

    of_queries: tuple
    of_keys: tuple
    lse: object
    sequences: object
    queries: object
    keys: object


@triton.jit
def rows_of(packed, b, M, N):
    """Return first row and length of batch entry b's queries, then of its keys.

    M and N are the lengths, or for packed sequences the rows in all: bad cu_seqlens stay inside the tensors. A sequence
    that is longer than the layout says ends there.
    """
    if packed is None:
        return 0, M, 0, N
    else:
        q0, m = clamped(packed.cu_q, b, M, packed.max_q)
        k0, n = clamped(packed.cu_k, b, N, packed.max_k)
        return q0, m, k0, n


@triton.jit
def clamped(cu, b, total, most):
    """Return start and length of sequence b, inside [0, total), and no longer than `most`, which is 2 n + 1."""
    start = tl.minimum(tl.maximum(tl.load(cu + b), 0), total)
    end = tl.minimum(tl.maximum(tl.load(cu + b + 1), start), total)
    return start, tl.minimum(end - start, most // 2)


@triton.jit
def fill_unused(unused, packed, rows, columns):
    """Fill the rows of outputs outside all sequences with zeros, and their lse with -inf. The first programs divide the
    work, in blocks of `rows` (R, 1) and `columns` (1, C)."""
    if packed is not None:
        programs = tl.minimum(tl.num_programs(0), FILL_PROGRAMS)
        if tl.program_id(0) < programs:
            count, lse, total = unused.sequences // 2, unused.lse, unused.queries // 2
            fill_after_sequences(
                unused.of_queries, lse, packed.cu_q, packed.max_q, total, count, programs, rows, columns
            )
            total = unused.keys // 2
            fill_after_sequences(unused.of_keys, None, packed.cu_k, packed.max_k, total, count, programs, rows, columns)


@triton.jit
def fill_after_sequences(outputs, lse, cu, most, total, count, programs, rows, columns):
    """Fill the same after sequences that are longer than the layout says, and after the last."""
    if len(outputs) > 0:
        program = tl.program_id(0)
        ROWS: tl.constexpr = rows.shape[0]
        for b in range(program, count, programs):
            start, length = clamped(cu, b, total, most)
            end = tl.minimum(tl.load(cu + b + 1), total)
            fill(outputs, lse, start + length, end, ROWS, total, rows, columns)
        end = tl.minimum(tl.maximum(tl.load(cu + count), 0), total)
        fill(outputs, lse, end + program * ROWS, total, programs * ROWS, total, rows, columns)


@triton.jit
def fill(outputs, lse, first, end, step, total, rows, columns):
    """Fill the same in blocks of rows, of which one begins every `step`, up to `end`."""
    for i in range(first, end, step):
        inside = i + rows < end
        for n in tl.static_range(len(outputs)):
            X = outputs[n].X
            heads, size = outputs[n].heads >> 1, outputs[n].size >> 1
            for h in range(heads):
                at = X.ptr + tl.cast(h, tl.int64) * X.head + (i + rows).to(tl.int64) * X.row
                for column in range(0, size, columns.shape[1]):
                    tl.store(at + column + columns, 0.0, mask=inside & (column + columns < size))
                if lse is not None:
                    tl.store(lse + tl.cast(h, tl.int64) * total + i + rows, float("-inf"), mask=inside)


@triton.jit
def origin(X, b, h, row):
    """Return the address of row `row` of head h of batch entry b; 64-bit."""
    return X.ptr + (b.to(tl.int64) * X.batch + h.to(tl.int64) * X.head + tl.cast(row, tl.int64) * X.row)


@triton.jit
def row_values(x, packed, b, h, H, q0, stride):
    """Return the address of the numbers of head h's rows, one a row: (B, H, stride), or packed (H, stride)."""
    if packed is None:
        return x + (b.to(tl.int64) * H + h) * stride
    else:
        return x + h.to(tl.int64) * stride + q0


@triton.jit
def scratch_values(packed, b, h, H, q0, stride, BLOCK: tl.constexpr):
    """Return where a head's row values begin in scratch, of `stride` numbers a head. BLOCK: the rows of a block, if
    packed sequences begin at blocks; else 1."""
    if packed is None or BLOCK == 1:
        return row_values(0, packed, b, h, H, q0, stride)
    else:
        return h.to(tl.int64) * stride + (q0 // BLOCK + b) * BLOCK  # each sequence wastes less than one block


@triton.jit
def pitch(M):
    """Return the stride of row values in scratch: M, rounded up so that every head's first lies on a 64-byte
    boundary."""
    return (M + 15) // 16 * 16


@triton.jit
def first_block(packed, b, h, H, q0, stride, B_R: tl.constexpr):
    """Return the first block of head h of batch entry b. A head has `stride` blocks; with packed sequences, all of them
    share these."""
    if packed is None:
        return (b * H + h) * stride
    else:
        return h * stride + q0 // B_R + b  # each sequence wastes less than one block
