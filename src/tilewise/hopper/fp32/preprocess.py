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

from ...tile.rows import fill_unused, first_block, row_values, rows_of
from ...tile.softmax import for_backward
from .split import INF, largest, load_block, store_pieces

BLOCK = tl.constexpr(64)
"""Counts the queries that share a scale."""


class Tile(NamedTuple):
    """Hold what the kernel is compiled for; all are constants."""

    d: int
    d_v: int
    ROWS: int
    """Counts the keys of a block."""
    SIZE: int
    """Counts the columns of a row in memory."""
    CENTRED: bool


class Operands(NamedTuple):
    """Hold what is read: four operands to split, and what row values are computed from."""

    Q: object
    K: object
    V: object
    dO: object  # noqa: N815
    O: object
    dL: object  # noqa: N815
    lse: object


class Blocks(NamedTuple):
    """Hold counts of blocks: of all queries and keys, and of those of one head. As an argument, each is 2 n + 1."""

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
def centre_block(to, b, h, H, first, rows, length, block, blocks, d: tl.constexpr, tile: tl.constexpr):
    """Split one block of K or of V again if it has a centre: centred, or else not. Another backward, of a gradient of
    lse or not, may have done the opposite."""
    point = centre_of(to, b, h, H, tile.SIZE)
    if tl.max(tl.abs(point), 0) > 0.0:
        x = load_block(to.X, b, h, first, rows, length, d, tile.SIZE)
        if tile.CENTRED:
            x = tl.where((rows < length)[:, None], x - point[None, :], 0.0)
        store_pieces(to, x, block, blocks)


@triton.jit
def prepare_keys(x, packed, program, N, H, tiles, in_all, tile: tl.constexpr):
    """Split one block of K and V again where it has a centre."""
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    _, _, k0, N = rows_of(packed, b, 0, N)
    if t * tile.ROWS < N:
        rows = t * tile.ROWS + tl.arange(0, tile.ROWS)
        block = first_block(packed, b, h, H, k0, in_all.key_head, tile.ROWS).to(tl.int64) + t
        centre_block(x.K, b, h, H, k0, rows, N, block, in_all.keys, tile.d, tile)
        centre_block(x.V, b, h, H, k0, rows, N, block, in_all.keys, tile.d_v, tile)


@triton.jit
def prepare_queries(x, scratch, packed, unit, program, M, H, group, tiles, in_all, tile: tl.constexpr):
    """Split one block of Q, compute L for centred K, and zero dQ and `done`. Past the last row P = exp(S - L) must
    vanish."""
    SIZE: tl.constexpr = tile.SIZE
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * BLOCK < M:
        rows, entries = t * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
        q = load_block(x.Q.X, b, h, q0, rows, M, tile.d, SIZE)
        logs = tl.load(row_values(x.lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=INF)
        logs = for_backward(logs, True)
        block = first_block(packed, b, h, H, q0, in_all.query_head, BLOCK).to(tl.int64) + t
        row = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(scratch.dq + row[:, None] * SIZE + entries[None, :], tl.zeros([BLOCK, SIZE], tl.float32))
        if tile.CENTRED:
            logs -= unit * tl.sum(q * centre_of(x.K, b, h // group, H // group, SIZE)[None, :], 1)
        tl.store(scratch.logs + row, logs)
        tl.store(scratch.done + b * H + h, 0, mask=t == 0)
        store_pieces(x.Q, q, block, in_all.queries)


@triton.jit
def prepare_gradients(x, scratch, D_top, packed, program, M, H, group, tiles, in_all, tile: tl.constexpr):
    """Split one block of dO, and compute D = rowsum(dO * O) - dL for centred V."""
    SIZE: tl.constexpr = tile.SIZE
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * BLOCK < M:
        rows = t * BLOCK + tl.arange(0, BLOCK)
        do = load_block(x.dO.X, b, h, q0, rows, M, tile.d_v, SIZE)
        o = load_block(x.O, b, h, q0, rows, M, tile.d_v, SIZE)
        if tile.CENTRED:
            o -= centre_of(x.V, b, h // group, H // group, SIZE)[None, :]  # past the end dO is 0
        delta = tl.sum(o * do, 1)
        if x.dL is not None:
            delta -= tl.load(row_values(x.dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
        block = first_block(packed, b, h, H, q0, in_all.query_head, BLOCK).to(tl.int64) + t
        tl.store(scratch.delta + block * BLOCK + tl.arange(0, BLOCK), delta)
        tl.store(D_top + block, largest(delta, 0))
        store_pieces(x.dO, do, block, in_all.queries)


@triton.jit(do_not_specialize=["packed", "unused", "M", "N", "H", "group", "batch", "key_tiles", "query_tiles"])
def attention_backward_preprocess_fp32(
    x, D_top, scratch, packed, unused, unit, M, N, H, group, batch, key_tiles, query_tiles, in_all,
    tile: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Preprocess one block of Q, or one of dO and O, or one of ROWS keys. Each has a separate program, so that many run
    concurrently. Also zero rows of gradients outside all sequences. PDL: as in backward/preprocess.py, the next
    kernel may begin."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    in_all = Blocks(in_all.queries >> 1, in_all.keys >> 1, in_all.query_head >> 1, in_all.key_head >> 1)
    program = tl.program_id(0)
    of_queries = batch * H * query_tiles
    if program < of_queries:
        prepare_queries(x, scratch, packed, unit, program, M, H, group, query_tiles, in_all, tile)
    elif program < 2 * of_queries:
        prepare_gradients(x, scratch, D_top, packed, program - of_queries, M, H, group, query_tiles, in_all, tile)
    else:
        prepare_keys(x, packed, program - 2 * of_queries, N, H // group, key_tiles, in_all, tile)
