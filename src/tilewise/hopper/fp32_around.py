"""Before the main kernel of the fp32 backward: operands in pieces (see pieces.py), and what it reads of each row.

All of it lies in blocks of 64 queries or one tile of keys, padded with zeros, each sequence in blocks of its own: the
main kernel sees no strides, ends or packed neighbours. Norms of blocks' rows bound dS, which gets its own scale there.

Attention does not change when one vector is taken from all keys of a head, and neither does dP - D when one is taken
from all values. So keys and values that lie around a point far from zero are centred there first: otherwise dQ would be
a small difference of large numbers, sum_j dS_ij K_j with sum_j dS_ij = 0.

Pieces that the forward has kept are not centred. They stay as they are where there is no such point, and are written
over where there is, with the same numbers by every backward that reads them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..tile.rows import row_values, rows_of
from ..tile.softmax import for_backward
from .around import first_block
from .pieces import INF, largest, load_block, store_pieces

SAMPLES = tl.constexpr(16)
BLOCK = tl.constexpr(64)
"""Queries that share a scale."""


class Blocks(NamedTuple):
    """Counts of blocks: of all queries and keys, and of those of one head."""

    queries: object
    keys: object
    query_head: object
    key_head: object


class Scales(NamedTuple):
    """Numbers of each block: what undoes the scales of fp16 pieces, and bounds."""

    q: object
    do: object
    k: object
    v: object
    do_norm: object
    """The largest norm of a row of dO."""
    v_norm: object
    """The same of V."""
    D: object
    """The largest |D|."""


@triton.jit
def centre(X, b, h, first, length, d: tl.constexpr, SIZE: tl.constexpr):
    """The mean of a sample of rows if all of them are nearer to it than it is to zero, else zero.

    Garbage behind a mask may be in the sample: then some real row is far from the mean.
    """
    rows = tl.arange(0, SAMPLES).to(tl.int64) * length // SAMPLES
    x = load_block(X, b, h, first, rows, length, d, SIZE)
    mean = tl.sum(x, 0) / SAMPLES
    away = tl.sqrt(tl.max(tl.sum((x - mean[None, :]) * (x - mean[None, :]), 1), 0))
    near = away < 0.75 * tl.sqrt(tl.sum(mean * mean, 0))  # false where anything is not finite
    return tl.where(near, mean, 0.0)


@triton.jit
def lie_away(X, b, h, first, length, d: tl.constexpr, SIZE: tl.constexpr):
    """Whether there is a centre."""
    return tl.max(tl.abs(centre(X, b, h, first, length, d, SIZE)), 0) > 0.0


@triton.jit
def split_block(
    to, b, h, first, rows, length, block, blocks, d: tl.constexpr, SIZE: tl.constexpr, CENTRED: tl.constexpr
):
    """One block of K or of V, centred."""
    x = load_block(to.X, b, h, first, rows, length, d, SIZE)
    if CENTRED:
        x = tl.where((rows < length)[:, None], x - centre(to.X, b, h, first, length, d, SIZE)[None, :], 0.0)
    store_pieces(to, x, block, blocks)


@triton.jit
def prepare_keys(
    K, V, packed, program, N, H, tiles, stride, blocks, d: tl.constexpr, d_v: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, CENTRED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Pieces of one block of K and V. Kept ones that have a centre are also written where nothing is to be centred:
    another backward may have done that."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    _, _, k0, N = rows_of(packed, b, 0, N)
    wanted = t * ROWS < N
    if KEPT:
        wanted &= lie_away(K.X, b, h, k0, N, d, SIZE) | lie_away(V.X, b, h, k0, N, d_v, SIZE)
    if wanted:
        rows = t * ROWS + tl.arange(0, ROWS)
        block = first_block(packed, b, h, H, k0, stride, ROWS).to(tl.int64) + t
        split_block(K, b, h, k0, rows, N, block, blocks, d, SIZE, CENTRED)
        split_block(V, b, h, k0, rows, N, block, blocks, d_v, SIZE, CENTRED)


@triton.jit
def prepare_queries(
    Q, dO, O, K, V, dL, lse, D_top, L, D, dQ, packed, unit, program, M, N, H, group, tiles, stride, blocks,
    d, d_v, SIZE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Of one block: pieces of Q and dO; L and D = rowsum(dO * O) - dL for centred K and V; zeros in dQ. Past the last
    row P = exp(S - L) must vanish."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, k0, N = rows_of(packed, b, M, N)
    if t * BLOCK < M:
        rows, entries = t * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
        q, do = load_block(Q.X, b, h, q0, rows, M, d, SIZE), load_block(dO.X, b, h, q0, rows, M, d_v, SIZE)
        o = load_block(O, b, h, q0, rows, M, d_v, SIZE)
        logs = tl.load(row_values(lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=INF)
        logs = for_backward(logs, True)
        if CENTRED:
            logs -= unit * tl.sum(q * centre(K.X, b, h // group, k0, N, d, SIZE)[None, :], 1)
            o -= centre(V.X, b, h // group, k0, N, d_v, SIZE)[None, :]  # past the end dO is 0
        sums = tl.sum(o * do, 1)
        if dL is not None:
            sums -= tl.load(row_values(dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
        block = first_block(packed, b, h, H, q0, stride, BLOCK).to(tl.int64) + t
        row = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(L + row, logs)
        tl.store(D + row, sums)
        tl.store(dQ + row[:, None] * SIZE + entries[None, :], tl.zeros([BLOCK, SIZE], tl.float32))
        store_pieces(Q, q, block, blocks)
        store_pieces(dO, do, block, blocks)
        tl.store(D_top + block, largest(sums, 0))


@triton.jit(do_not_specialize=["packed", "M", "N", "H", "group", "batch", "key_tiles", "query_tiles"])
def fp32_prepare(
    Q, K, V, dO, O, dL, lse, D_top, L, D, dQ, packed, unit, M, N, H, group, batch, key_tiles, query_tiles, in_all,
    d: tl.constexpr, d_v: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, CENTRED: tl.constexpr,
    KEPT: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """One block of ROWS keys, or one of queries. KEPT: the pieces of keys are there; with no programs for them
    (key_tiles is 0) they are what they should be. AHEAD: as in around.py."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    of_keys = batch * (H // group) * key_tiles
    if program < of_keys:
        prepare_keys(
            K, V, packed, program, N, H // group, key_tiles, in_all.key_head, in_all.keys,
            d, d_v, ROWS, SIZE, CENTRED, KEPT,
        )  # fmt: skip
    else:
        prepare_queries(
            Q, dO, O, K, V, dL, lse, D_top, L, D, dQ, packed, unit, program - of_keys, M, N,
            H, group, query_tiles, in_all.query_head, in_all.queries, d, d_v, SIZE, CENTRED,
        )  # fmt: skip
