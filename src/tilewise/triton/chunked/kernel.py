"""The backward where registers hold no tile of a gradient: P and dS of a chunk of key tiles lie in memory.

    attention_backward_chunk         computes P and dS of one tile of S, and stores them
    attention_backward_chunk_sums    sums columns of dV = P^T dO or dK = dS^T Q over the queries of a key tile, or of
                                     dQ = dS K over the chunk's keys of a query tile

So S is computed once, and there are five products as on paper. A chunk has key tiles of one key head after the other.
In its memory each of them has a matrix for each query head that shares it, of all queries x B_C.
"""
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.blocks import load_row_values
from ...tile.factors import on_fma_units
from ...tile.gradients import scores_gradient
from ...tile.ranges import Place, key_range, query_range
from ...tile.rows import origin, pitch, row_values, rows_of
from ..backward import accumulate


class Tile(NamedTuple):
    """Hold the constants of a kernel: query heads that share a key head; head sizes; rows and columns of a tile of S;
    the columns that a program sums; how many entries a product sums at a time; how products are computed."""

    G: int
    d: int
    d_v: int
    B_R: int
    B_C: int
    COLUMNS: int
    SLICE: int
    PRECISION: str


class Chunk(NamedTuple):
    """Locate a chunk: its P and dS; its first key tile, among those of all key heads; how many it has; the key tiles of
    a head, and the query tiles. Counts are 2 n + 1, as in `Packed`, and the first tile is 2 n + 3, as it may be 0."""

    p: object
    ds: object
    first: object
    count: object
    key_tiles: object
    query_tiles: object


@triton.jit
def first_of(chunk):
    """Return a chunk's first key tile."""
    return (chunk.first >> 1) - 1


@triton.jit
def matrix_of(X, chunk, u, g, tile: tl.constexpr):
    """Return where the matrix of the chunk's key tile u and the g-th of the query heads that share it begins."""
    n = u * tile.G + g
    return X + n.to(tl.int64) * (chunk.query_tiles >> 1) * (tile.B_R * tile.B_C)


@triton.jit
def load_part(
    X, start, first, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, length, size: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Load rows of X from `first` on, every STEP-th, and columns from `column` on, zero past `length` and past the
    size. # (ROWS, COLUMNS)"""
    rows, columns = first + STEP * tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (rows < length)[:, None]
    if size % COLUMNS:
        inside = inside & (columns < size)[None, :]
    return tl.load(start + rows.to(tl.int64)[:, None] * X.row + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_part(X, start, first, column, length, size: tl.constexpr, x):
    """Store what `load_part` would load."""
    rows, columns = first + tl.arange(0, x.shape[0]), column + tl.arange(0, x.shape[1])
    inside = (rows < length)[:, None] & (columns < size)[None, :]
    at = start + rows.to(tl.int64)[:, None] * X.row + columns[None, :]
    tl.store(at, x.to(X.ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_transposed(
    X, start, first, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, length, size: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the same as a right factor, for FMA units with pairs of rows side by side (tile/factors.py). # (COLUMNS,
    ROWS)"""
    if on_fma_units(X.ptr.dtype.element_ty, PRECISION):
        even = load_part(X, start, first, column, ROWS // 2, COLUMNS, length, size, 2)
        odd = load_part(X, start, first + 1, column, ROWS // 2, COLUMNS, length, size, 2)
        return tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (COLUMNS, ROWS))
    else:
        return load_part(X, start, first, column, ROWS, COLUMNS, length, size, 1).T


@triton.jit
def row_products(X, x, i0, M, Y, y, j0, N, one, size: tl.constexpr, tile: tl.constexpr):
    """Return the products of rows of X and rows of Y, a slice of their entries at a time. # (B_R, B_C)"""
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    SLICE: tl.constexpr = tile.SLICE
    PRECISION: tl.constexpr = tile.PRECISION
    sums = tl.zeros([B_R, B_C], tl.float32)
    for column in range(0, size, SLICE):
        left = load_part(X, x, i0, column, B_R, SLICE, M, size, 1)
        right = load_transposed(Y, y, j0, column, B_C, SLICE, N, size, PRECISION)
        sums = accumulate(sums, (left,), (right,), one, PRECISION)
    return sums


@triton.jit(do_not_specialize=["packed", "variant", "factors", "M", "N", "H_k", "chunk"])
def attention_backward_chunk(
    Q, K, V, dO, scratch, packed, variant, factors, M, N, H_k, chunk, tile: tl.constexpr
):  # fmt: skip
    """Store P after dropout and dS of one tile of S, if the mask shows any of it."""
    G: tl.constexpr = tile.G
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    dtype: tl.constexpr = Q.ptr.dtype.element_ty
    query_tiles, key_tiles = chunk.query_tiles >> 1, chunk.key_tiles >> 1
    program = tl.program_id(0)
    r, g, u = program % query_tiles, program // query_tiles % G, program // query_tiles // G
    n = first_of(chunk) + u
    matrix, t = n // key_tiles, n % key_tiles
    b, h_k = matrix // H_k, matrix % H_k
    h = h_k * G + g
    stride = pitch(M)
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0, j0 = r * B_R, t * B_C
    if (i0 >= M) | (j0 >= N):
        return
    place = Place(b, h, b * (H_k * G) + h, i0, M, N, N - M)
    lo, _, _, hi = query_range(variant, 0, b, j0, M, N, B_R, B_C)
    key_lo, _, _, key_hi = key_range(variant, 0, place, B_R, B_C)
    if ((r < lo) | (r >= hi)) & ((t < key_lo) | (t >= key_hi)):  # each sum asks one of both
        return
    one = factors.one
    S = row_products(Q, origin(Q, b, h, q0), i0, M, K, origin(K, b, h_k, k0), j0, N, one, tile.d, tile)
    dP = row_products(dO, origin(dO, b, h, q0), i0, M, V, origin(V, b, h_k, k0), j0, N, one, tile.d_v, tile)
    logs = load_row_values(row_values(scratch.logs, packed, b, h, H_k * G, q0, stride), i0, B_R, M, float("inf"), True)
    delta = load_row_values(row_values(scratch.delta, packed, b, h, H_k * G, q0, stride), i0, B_R, M, 0.0, True)
    i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    P, dS = scores_gradient(
        S, dP, logs[:, None], delta[:, None], place, variant, factors.unit, i, j0, j, dtype == tl.float32, True, 0
    )  # fmt: skip
    at = (i0 + i).to(tl.int64) * B_C + j
    tl.store(matrix_of(chunk.p, chunk, u, g, tile) + at, P.to(dtype))
    tl.store(matrix_of(chunk.ds, chunk, u, g, tile) + at, dS.to(dtype))


@triton.jit
def sum_over_queries(
    W, chunk, u, X, dX, packed, M, N, b, h_k, tiles, column, factor, one, size: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Store columns of W^T X times a factor, summed over a range of query tiles of all heads that share the key."""
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    SLICE: tl.constexpr = tile.SLICE
    COLUMNS: tl.constexpr = tile.COLUMNS
    PRECISION: tl.constexpr = tile.PRECISION
    q0, M, k0, N = rows_of(packed, b, M, N)
    t = (first_of(chunk) + u) % (chunk.key_tiles >> 1)
    if t * B_C >= N:
        return
    lo, hi = tiles
    each = (hi - lo) * (B_R // SLICE)
    sums = tl.zeros([B_C, COLUMNS], tl.float32)
    for x in range(tile.G * each):
        g, row = x // each, lo * B_R + x % each * SLICE
        at = (row + tl.arange(0, SLICE)).to(tl.int64)[:, None] * B_C + tl.arange(0, B_C)[None, :]
        w = tl.load(matrix_of(W, chunk, u, g, tile) + at)  # (SLICE, B_C)
        start = origin(X, b, h_k * tile.G + g, q0)
        rows = load_part(X, start, row, column, SLICE, COLUMNS, M, size, 1)
        sums = accumulate(sums, (w.T,), (rows,), one, PRECISION)
    store_part(dX, origin(dX, b, h_k, k0), t * B_C, column, N, size, sums * factor)


@triton.jit
def sum_over_keys(
    K, sums, dQ, packed, variant, factors, M, N, H_k, chunk, matrix, g, r, column, tile: tl.constexpr
):  # fmt: skip
    """Add the chunk's keys to columns of dQ of a query tile. The last chunk that the tile sees stores dQ. `sums` is
    None where a chunk has all keys of its heads."""
    G: tl.constexpr = tile.G
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    SLICE: tl.constexpr = tile.SLICE
    COLUMNS: tl.constexpr = tile.COLUMNS
    PRECISION: tl.constexpr = tile.PRECISION
    b, h_k = matrix // H_k, matrix % H_k
    h = h_k * G + g
    q0, M, k0, N = rows_of(packed, b, M, N)
    i0 = r * B_R
    if i0 >= M:
        return
    place = Place(b, h, b * (H_k * G) + h, i0, M, N, N - M)
    lo, _, _, hi = key_range(variant, 0, place, B_R, B_C)
    key_tiles, before = chunk.key_tiles >> 1, matrix * (chunk.key_tiles >> 1)
    first = tl.maximum(first_of(chunk) - before, 0)  # of the head's key tiles, the chunk has first..end
    end = tl.minimum(first_of(chunk) + (chunk.count >> 1) - before, key_tiles)
    lo, hi = tl.where(hi > lo, lo, 0), tl.where(hi > lo, hi, 0)
    if (lo >= end) | ((hi <= first) & (first > 0)):  # rows that see nothing have zeros of the first chunk
        return
    acc = tl.zeros([B_R, COLUMNS], tl.float32)
    for x in range(tl.maximum(lo, first) * (B_C // SLICE), tl.minimum(hi, end) * (B_C // SLICE)):
        t, part = x // (B_C // SLICE), x % (B_C // SLICE) * SLICE
        at = (i0 + tl.arange(0, B_R)).to(tl.int64)[:, None] * B_C + part + tl.arange(0, SLICE)[None, :]
        ds = tl.load(matrix_of(chunk.ds, chunk, before + t - first_of(chunk), g, tile) + at)  # (B_R, SLICE)
        k = load_part(K, origin(K, b, h_k, k0), t * B_C + part, column, SLICE, COLUMNS, N, tile.d, 1)
        acc = accumulate(acc, (ds,), (k,), factors.one, PRECISION)
    if sums is not None:
        start = origin(sums, b, h, q0)
        if lo < first:
            acc += load_part(sums, start, i0, column, B_R, COLUMNS, M, tile.d, 1)
        if hi > end:
            store_part(sums, start, i0, column, M, tile.d, acc)
            return
    store_part(dQ, origin(dQ, b, h, q0), i0, column, M, tile.d, acc * factors.scale)


@triton.jit(do_not_specialize=["packed", "variant", "factors", "M", "N", "H_k", "chunk"])
def attention_backward_chunk_sums(
    Q, K, dO, sums, dQ, dK, dV, packed, variant, factors, M, N, H_k, chunk, tile: tl.constexpr
):  # fmt: skip
    """Compute columns of dV or dK of one key tile, which take longest and so come first, or of dQ of a query tile."""
    COLUMNS: tl.constexpr = tile.COLUMNS
    OF_K: tl.constexpr = (tile.d + COLUMNS - 1) // COLUMNS
    OF_V: tl.constexpr = (tile.d_v + COLUMNS - 1) // COLUMNS
    key_tiles, query_tiles = chunk.key_tiles >> 1, chunk.query_tiles >> 1
    program, of_keys = tl.program_id(0), (chunk.count >> 1) * (OF_K + OF_V)
    if program >= of_keys:
        program -= of_keys
        n, column, r = program // OF_K // query_tiles, program % OF_K * COLUMNS, program // OF_K % query_tiles
        matrix = first_of(chunk) // key_tiles + n // tile.G
        sum_over_keys(
            K, sums, dQ, packed, variant, factors, M, N, H_k, chunk, matrix, n % tile.G, r, column, tile
        )  # fmt: skip
    else:
        u, c, one = program // (OF_K + OF_V), program % (OF_K + OF_V), factors.one
        matrix = (first_of(chunk) + u) // key_tiles
        b, h_k, j0 = matrix // H_k, matrix % H_k, (first_of(chunk) + u) % key_tiles * tile.B_C
        _, m, _, n = rows_of(packed, b, M, N)
        lo, _, _, hi = query_range(variant, 0, b, j0, m, n, tile.B_R, tile.B_C)
        if c < OF_V:
            sum_over_queries(
                chunk.p, chunk, u, dO, dV, packed, M, N, b, h_k, (lo, hi), c * COLUMNS, 1.0, one, tile.d_v, tile
            )  # fmt: skip
        else:
            column = (c - OF_V) * COLUMNS
            sum_over_queries(
                chunk.ds, chunk, u, Q, dK, packed, M, N, b, h_k, (lo, hi), column, factors.scale, one, tile.d, tile
            )  # fmt: skip
