"""Dropout's decisions, bit for bit those of reference.dropout_keep."""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """The seed's address, the number below which 16 bits drop their entry, and what is kept is multiplied by."""

    seed: object
    threshold: object
    rescale: object


@triton.jit
def kept(dropout, row, i0, i, j0, j):
    """Z: 0 where dropped, else `dropout.rescale`, for entries (i0 + i, j0 + j) of score matrix `row` = b H + h.

    i0 and j0 are multiples of the tile's sides, which are powers of 2 from 16 on; i and j run inside the tile, and i is
    not shifted. Written this way the compiler sees that i and i + 8 of j, j + 8, j + 16 and j + 24 share a counter: a
    thread that holds several of the eight computes it once. In tiles of 16 columns, bit 4 of the column is that of j0.
    """
    seed = tl.load(dropout.seed)
    c_i = (i0 >> 1) + ((i >> 4) << 3 | i & 7)  # bit 3 taken out
    c_j = ((j0 >> 5) << 3) + ((j >> 5) << 3 | j & 7)  # bits 3 and 4 taken out
    c_row = row + 0 * (c_i + c_j)
    w0, w1, w2, w3 = tl.philox(seed, c_j + 0 * c_i, c_i + 0 * c_j, c_row, 0 * c_row)
    i_high, j_high = (i >> 3) & 1 == 1, (j >> 3) & 1 == 1
    word = tl.where(i_high, tl.where(j_high, w3, w2), tl.where(j_high, w1, w0))
    upper = ((j0 >> 4 | j >> 4) & 1) == 1
    half = tl.where(upper, word >> 16, word).to(tl.uint16)
    return tl.where(half >= dropout.threshold, dropout.rescale, 0.0)
