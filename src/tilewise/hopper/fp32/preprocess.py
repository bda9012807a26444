"""Preprocess for the fp32 backward: split operands into pieces (see split.py), and compute what it reads of each row.

All of it lies in blocks of 64 queries or one key tile, padded with zeros, each sequence in separate blocks. So the main
kernel sees no strides, ragged tails or packed neighbours. Norms of blocks' rows bound dS, which gets a scale there.

Attention does not change when one vector is subtracted from all keys of a head. Neither does dP - D when one is
subtracted from all values. So keys and values that lie near a point far from zero are centred there first. Otherwise dQ
would be a small difference of large numbers, sum_j dS_ij K_j with sum_j dS_ij = 0.

Pieces of keys come from the kernel that splits them for the forward, which also finds that point (split.py). They stay
as they are where there is none. Where there is one, every backward that reads them writes them over, with the same
numbers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.rows import fill_unused, row_values, rows_of
from ...tile.softmax import for_backward
from ..parts.row_blocks import first_block
from .split import INF, largest, load_block, store_pieces

BLOCK = tl.constexpr(64)
"""Counts the queries that share a scale."""


class Blocks(NamedTuple):
    """Hold counts of blocks: of all queries and keys, and of those of one head."""

    queries: object
    keys: object
    query_head: object
    key_head: object


class Scales(NamedTuple):
    """Hold the numbers of each block: descale factors of fp16 pieces, and bounds."""

    q: object
    do: object
    k: object
    v: object
    do_norm: object
    """Holds the largest norm of a row of dO."""
    v_norm: object
    """Holds the same of V."""
    D: object
    """Holds the largest |D|."""


@triton.jit
def centre_of(to, b, h, H, SIZE: tl.constexpr):
    """Return what is subtracted from every row of head h of H: zero, or the point near which they lie."""
    return tl.load(to.centre + (b * H + h) * SIZE + tl.arange(0, SIZE))


@triton.jit
def centre_block(
    to, b, h, H, first, rows, length, block, blocks, d: tl.constexpr, SIZE: tl.constexpr, CENTRED: tl.constexpr
):
    """Split one block of K or of V again if it has a centre: centred, or else not. Another backward, of a gradient of
    lse or not, may have done the opposite."""
    point = centre_of(to, b, h, H, SIZE)
    if tl.max(tl.abs(point), 0) > 0.0:
        x = load_block(to.X, b, h, first, rows, length, d, SIZE)
        if CENTRED:
            x = tl.where((rows < length)[:, None], x - point[None, :], 0.0)
        store_pieces(to, x, block, blocks)


@triton.jit
def prepare_keys(
    K, V, packed, program, N, H, tiles, stride, blocks, d: tl.constexpr, d_v: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Split one block of K and V again where it has a centre."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    _, _, k0, N = rows_of(packed, b, 0, N)
    if t * ROWS < N:
        rows = t * ROWS + tl.arange(0, ROWS)
        block = first_block(packed, b, h, H, k0, stride, ROWS).to(tl.int64) + t
        centre_block(K, b, h, H, k0, rows, N, block, blocks, d, SIZE, CENTRED)
        centre_block(V, b, h, H, k0, rows, N, block, blocks, d_v, SIZE, CENTRED)


@triton.jit
def prepare_queries(
    Q, K, lse, L, dQ, done, packed, unit, program, M, H, group, tiles, stride, blocks,
    d, SIZE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Split one block of Q, compute L for centred K, and zero dQ and `done`. Past the last row P = exp(S - L) must
    vanish."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * BLOCK < M:
        rows, entries = t * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
        q = load_block(Q.X, b, h, q0, rows, M, d, SIZE)
        logs = tl.load(row_values(lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=INF)
        logs = for_backward(logs, True)
        block = first_block(packed, b, h, H, q0, stride, BLOCK).to(tl.int64) + t
        row = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(dQ + row[:, None] * SIZE + entries[None, :], tl.zeros([BLOCK, SIZE], tl.float32))
        if CENTRED:
            logs -= unit * tl.sum(q * centre_of(K, b, h // group, H // group, SIZE)[None, :], 1)
        tl.store(L + row, logs)
        tl.store(done + b * H + h, 0, mask=t == 0)
        store_pieces(Q, q, block, blocks)


@triton.jit
def prepare_gradients(
    dO, O, V, dL, D_top, D, packed, program, M, H, group, tiles, stride, blocks,
    d_v, SIZE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Split one block of dO, and compute D = rowsum(dO * O) - dL for centred V."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * BLOCK < M:
        rows = t * BLOCK + tl.arange(0, BLOCK)
        do, o = load_block(dO.X, b, h, q0, rows, M, d_v, SIZE), load_block(O, b, h, q0, rows, M, d_v, SIZE)
        if CENTRED:
            o -= centre_of(V, b, h // group, H // group, SIZE)[None, :]  # past the end dO is 0
        delta = tl.sum(o * do, 1)
        if dL is not None:
            delta -= tl.load(row_values(dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
        block = first_block(packed, b, h, H, q0, stride, BLOCK).to(tl.int64) + t
        tl.store(D + block * BLOCK + tl.arange(0, BLOCK), delta)
        tl.store(D_top + block, largest(delta, 0))
        store_pieces(dO, do, block, blocks)


@triton.jit(do_not_specialize=["packed", "unused", "M", "N", "H", "group", "batch", "key_tiles", "query_tiles"])
def attention_backward_preprocess_fp32(
    Q, K, V, dO, O, dL, lse, D_top, L, D, dQ, done, packed, unused, unit, M, N, H, group, batch, key_tiles,
    query_tiles, in_all, d: tl.constexpr, d_v: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    CENTRED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Preprocess one block of Q, or one of dO and O, or one of ROWS keys. Each has a separate program, so that many run
    concurrently. Also zero rows of gradients outside all sequences. PDL: as in backward/preprocess.py, the next
    kernel may begin."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    program = tl.program_id(0)
    of_queries = batch * H * query_tiles
    if program < of_queries:
        prepare_queries(
            Q, K, lse, L, dQ, done, packed, unit, program, M, H, group, query_tiles, in_all.query_head,
            in_all.queries, d, SIZE, CENTRED,
        )  # fmt: skip
    elif program < 2 * of_queries:
        prepare_gradients(
            dO, O, V, dL, D_top, D, packed, program - of_queries, M, H, group, query_tiles, in_all.query_head,
            in_all.queries, d_v, SIZE, CENTRED,
        )  # fmt: skip
    else:
        prepare_keys(
            K, V, packed, program - 2 * of_queries, N, H // group, key_tiles, in_all.key_head, in_all.keys,
            d, d_v, ROWS, SIZE, CENTRED,
        )  # fmt: skip
