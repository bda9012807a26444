"""The gradient of a sink, which is a key of value 0: dS = P_sink * (0 - delta), summed over all rows of a head."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["step", "halvings", "B", "M", "H", "queries", "stride"])
def attention_backward_sink(
    grad, sink, step, lse, delta, cu, halvings, B, M, H, queries, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Write the gradient of a sink (H,): a program sums the rows of one head, ROWS at a time, in order.

    A batch entry has M rows in lse and `stride` in delta. Packed sequences are one entry; with cu (B + 1,), each begins
    at a block of delta.
    """
    h = tl.program_id(0).to(tl.int64)
    logit = tl.load(sink + h * step).to(tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    for t in range(tl.cdiv(queries, ROWS)):
        row = t * ROWS + tl.arange(0, ROWS)
        head, i, inside = (row // M).to(tl.int64) * H + h, row % M, row < queries
        at = i if cu is None else row_in_blocks(cu, halvings, B, row, BLOCK)
        L = tl.load(lse + head * M + i, inside, other=float("-inf"))
        D = tl.load(delta + head * stride + at, inside & (at >= 0) & (at < stride), other=0.0)
        acc -= tl.where(L == float("-inf"), 0.0, tl.exp(logit - L) * D)  # no key, or outside all sequences
    tl.store(grad + h, tl.sum(acc, 0).to(grad.dtype.element_ty))


@triton.jit
def row_in_blocks(cu, halvings, B, row, BLOCK: tl.constexpr):
    """Return where rows of B < 2^halvings packed sequences lie in scratch, by a binary search for their sequences."""
    b, start = tl.zeros_like(row), tl.zeros_like(row)
    for n in range(halvings):
        later = b + (1 << (halvings - 1 - n))
        begin = tl.load(cu + later, later < B, other=2**31 - 1)
        b, start = tl.where(begin <= row, later, b), tl.where(begin <= row, begin, start)
    return (start // BLOCK + b) * BLOCK + row - start
