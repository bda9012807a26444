"""Blocks of rows, in which the backward's kernels keep sums of dQ and what they read of each row.

dQ is summed in fp32, in blocks of B_R rows, in the order in which a warpgroup holds a 64 x 64 piece of a product in its
registers: each piece is 4096 numbers in a row. Row values lie in the same blocks, one number a row.
"""

import triton
import triton.language as tl


@triton.jit
def first_block(packed, b, h, H, q0, stride, B_R: tl.constexpr):
    """The first block of head h of batch entry b; `stride` blocks a head, or a head of all packed sequences."""
    if packed is None:
        return (b * H + h) * stride
    else:
        return h * stride + q0 // B_R + b  # each sequence wastes less than one block
