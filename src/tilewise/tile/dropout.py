"""Dropout's decisions, bit for bit those of reference.dropout_keep."""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """The seed's address, the number below which a 32-bit word drops its entry, and 1 / (1 - p)."""

    seed: object
    threshold: object
    rescale: object


@triton.jit
def kept(dropout, row, i0, i, j0, j):
    """Z: 0 where dropped, 1 / (1 - p) where kept, for entries (i0 + i, j0 + j) of score matrix `row` = b H + h.

    i0 and j0 are multiples of 16, i and j run inside the tile, and i is not shifted. Written this way the compiler sees
    that (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8) share a counter: a thread with all four computes it once.
    """
    seed = tl.load(dropout.seed)
    c_i = (i0 >> 1) + ((i >> 4) << 3 | i & 7)  # bit 3 taken out
    c_j = (j0 >> 1) + ((j >> 4) << 3 | j & 7)
    c_row = row + 0 * (c_i + c_j)
    w0, w1, w2, w3 = tl.philox(seed, c_j + 0 * c_i, c_i + 0 * c_j, c_row, 0 * c_row)
    i_high, j_high = (i >> 3) & 1 == 1, (j >> 3) & 1 == 1
    word = tl.where(i_high, tl.where(j_high, w3, w2), tl.where(j_high, w1, w0))
    return tl.where(word >= dropout.threshold, dropout.rescale, 0.0)
