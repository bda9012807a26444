"""Decide which entries dropout keeps, bit for bit as dropout.dropout_keep."""

from typing import NamedTuple

import triton
import triton.language as tl


class Counters(NamedTuple):
    """Say where the call's score matrices lie in the whole's: its first row and column, which are multiples of 16 and
    64; the heads of the whole, and the first matrix. Each number is 2 n + 1, as in `Packed`."""

    row: object
    column: object
    of_heads: object
    matrix: object


class Dropout(NamedTuple):
    """Hold the seed's address, the number below which 16 bits drop their entry, and the factor of what is kept."""

    seed: object
    threshold: object
    rescale: object
    counters: tuple = ()
    """Counters of a call that is a part of a larger one, else an empty tuple: Triton takes no None at this depth."""


@triton.jit
def dropout_mask(dropout, place, i0, i, j0, j):
    """Return Z: 0 where dropped, else `dropout.rescale`, for entries (i0 + i, j0 + j) of a place's score matrix.

    i0 and j0 are multiples of the tile's sizes, which are powers of 2 from 16 on. i and j run inside the tile, and i is
    not shifted. Written this way the compiler sees that rows i and i + 8 of columns j, j + 8, ..., j + 56 share a
    counter. So a thread that holds several of the sixteen computes it once. In tiles of 16 columns, bits 4 and 5 of the
    column are those of j0, in tiles of 32 bit 5 is.
    """
    row = place.matrix
    first_i, first_j = i0 >> 1, (j0 >> 6) << 3
    if len(dropout.counters) > 0:
        first_i, first_j = first_i + (dropout.counters.row >> 2), first_j + ((dropout.counters.column >> 7) << 3)
        row = (dropout.counters.matrix >> 1) + place.b * (dropout.counters.of_heads >> 1) + place.h
    seed = tl.load(dropout.seed)
    c_i = first_i + ((i >> 4) << 3 | i & 7)  # bit 3 taken out
    c_j = first_j + ((j >> 6) << 3 | j & 7)  # bits 3, 4 and 5 taken out
    c_row = row + 0 * (c_i + c_j)
    w0, w1, w2, w3 = tl.philox(seed, c_j + 0 * c_i, c_i + 0 * c_j, c_row, 0 * c_row)
    bit_4, bit_5 = (j0 >> 4 | j >> 4) & 1 == 1, (j0 >> 5 | j >> 5) & 1 == 1
    own = tl.where(bit_5, tl.where(bit_4, w3, w2), tl.where(bit_4, w1, w0))
    byte = 8 * (2 * (i >> 3 & 1) + (j >> 3 & 1))
    number = (own >> byte & 0xFF) << 8 | (w0 ^ w1 ^ w2 ^ w3) >> byte & 0xFF
    return tl.where(number >= dropout.threshold, dropout.rescale, 0.0)
