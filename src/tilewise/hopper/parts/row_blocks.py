"""Address the blocks of rows in which the backward's kernels keep sums of dQ and row values.

dQ is summed in fp32, in blocks of B_R rows, in a warpgroup's register order of a 64 x 64 piece of a product. Each piece
is 4096 adjacent numbers. Row values lie in the same blocks, one number a row.
"""

import triton
import triton.language as tl


@triton.jit
def first_block(packed, b, h, H, q0, stride, B_R: tl.constexpr):
    """Return the first block of head h of batch entry b. A head has `stride` blocks; with packed sequences, all of them
    share these."""
    if packed is None:
        return (b * H + h) * stride
    else:
        return h * stride + q0 // B_R + b  # each sequence wastes less than one block
