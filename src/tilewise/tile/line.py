"""Divide keys among programs, whatever the lengths: all tiles of keys stand in one line, and each takes a piece of it.

For one key head, the line holds the key tiles of every tile of rows, sequence by sequence (stream-K, Osama et al.
2023). A tile of rows has (query, head of the group) pairs as rows, so a group's heads read their keys once. Programs
compute the line from cu_q and lengths by themselves; it is the same for every key head. With a CHUNK, a place in the
line is not a tile of keys but a piece of CHUNK keys, and a program's share of the line is cut into them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .cache import keys_of, queries_of
from .masks import key_range_of, key_tiles


class Split(NamedTuple):
    """Hold the constants of the kernels: G query heads share a key head; head sizes; rows of a page, or 0; rows and
    columns of a tile of S; keys of a chunk, or 0; B_B >= B, a power of two; the fewest keys that a program takes; how
    many stages loads are ahead; how products are computed; whether the chip is one of `tiles.HOPPER`."""

    G: int
    d: int
    d_v: int
    P: int
    B_R: int
    B_C: int
    CHUNK: int
    B_B: int
    LEAST: int
    STAGES: int
    PRECISION: str
    HOPPER: bool
    PAIRS: bool = False
    """Says whether values are in 8 bits, and two neighbours are loaded as one integer."""
    AHEAD: bool = False
    """Says whether q is loaded with each tile of keys, so that a piece's first keys need not wait for it."""
    EARLY: bool = False
    """Says whether a later kernel may begin before `attention_combine` ends: only one of its programs fits a
    multiprocessor, so that none gets two."""


class Line(NamedTuple):
    """Hold of each sequence its number, where its places end, how many row tiles it has, and how many places each of
    those takes; the number of places in all, and of programs that share them."""

    sequences: object
    end: object
    tiles: object
    each: object
    total: object
    programs: object


class Work(NamedTuple):
    """Hold what a program sums of one tile of rows. The tile has a sequence b, a number r, and `each` places in the
    line, of which the program takes `count` from place x on. The sequence has M queries, from row q0 of q on, and N
    keys, from row `start` of the cache on. The tile sees the keys [first, last). The key tiles [lo, hi) are summed, of
    which [full_lo, full_hi) need no mask."""

    b: object
    r: object
    x: object
    each: object
    count: object
    q0: object
    M: object
    start: object
    N: object
    first: object
    last: object
    lo: object
    full_lo: object
    full_hi: object
    hi: object


@triton.jit
def line_of(batch, mask, W, sequences, split: tl.constexpr):
    """Return the line of a batch, for at most W programs. `sequences` is a vector of split.B_B numbers from 0 on."""
    SIZE: tl.constexpr = split.CHUNK if split.CHUNK > 0 else split.B_C
    count = batch.B // 2
    b = tl.minimum(sequences, count - 1)
    _, m = queries_of(batch, b)
    _, n = keys_of(batch, b)
    lo, _ = key_range_of(mask, b, n - m, n)  # what its first row sees first
    _, hi = key_range_of(mask, b, n - 1, n)  # and its last row last
    each = tl.maximum(tl.where(hi > lo, tl.cdiv(hi, SIZE) - lo // SIZE, 0), 1)  # without keys, a place for its outputs
    tiles = tl.where(sequences < count, tl.cdiv(m * split.G, split.B_R), 0)
    end = tl.cumsum(tiles * each, 0)
    total = tl.max(end, 0)
    programs = tl.maximum(tl.minimum(W, tl.cdiv(total * SIZE, split.LEAST)), 1)
    return Line(sequences, end, tiles, each, total, programs)


@triton.jit
def piece_of(line, w):
    """Return the places [first, last) of program w; none if it is not needed."""
    each, rest = line.total // line.programs, line.total % line.programs  # w * total may exceed 32 bits
    first = w * each + w * rest // line.programs
    last = (w + 1) * each + (w + 1) * rest // line.programs
    return first, tl.where(w < line.programs, last, first)


@triton.jit
def owner_of(line, place):
    """Return the program whose piece has a place."""
    return (((place + 1).to(tl.int64) * line.programs - 1) // line.total).to(tl.int32)


@triton.jit
def pick(line, values, b):
    """Return sequence b's entry of a vector over sequences."""
    return tl.sum(tl.where(line.sequences == b, values, 0), 0)


@triton.jit
def find(line, at):
    """Return the sequence, the row tile and the place within it of a place, and how many that row tile takes."""
    b = tl.sum((line.end <= at).to(tl.int32), 0)
    each = pick(line, line.each, b)
    at -= tl.max(tl.where(line.end <= at, line.end, 0), 0)
    return b, at // each, at % each, each


@triton.jit
def work_at(line, at, stop, batch, mask, split: tl.constexpr):
    """Return what a program, whose piece ends before place `stop`, sums of the tile of rows at place `at`."""
    B_R: tl.constexpr = split.B_R
    B_C: tl.constexpr = split.B_C
    G: tl.constexpr = split.G
    SIZE: tl.constexpr = split.CHUNK if split.CHUNK > 0 else split.B_C
    b, r, x, each = find(line, at)
    count = tl.minimum(each - x, stop - at)
    if split.CHUNK > 0:
        count = tl.minimum(count, 1)
    q0, M = queries_of(batch, b)
    start, N = keys_of(batch, b)
    first_row = N - M + r * B_R // G
    last_row = N - M + tl.minimum((r * B_R + B_R - 1) // G, M - 1)
    first, _ = key_range_of(mask, b, first_row, N)
    _, last = key_range_of(mask, b, last_row, N)
    lo, full_lo, full_hi, hi = key_tiles(mask, b, first_row, last_row, N, B_C)
    begin, _ = key_range_of(mask, b, N - M, N)
    begin = (begin // SIZE + x) * (SIZE // B_C)
    lo, hi = tl.maximum(lo, begin), tl.minimum(hi, begin + count * (SIZE // B_C))
    full_lo = tl.minimum(tl.maximum(full_lo, lo), hi)
    full_hi = tl.minimum(tl.maximum(full_hi, full_lo), hi)
    return Work(b, r, x, each, count, q0, M, start, N, first, last, lo, full_lo, full_hi, hi)
