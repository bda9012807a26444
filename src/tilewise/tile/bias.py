"""Compute the gradient of a bias in a separate kernel, since only it sums over what a bias is broadcast over."""

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import block, load_row_values
from .factors import load_left, load_right, product
from .gradients import scores_gradient
from .ranges import Place
from .rows import origin, row_values


class Kind(NamedTuple):
    """Say which score is the bias, and whether it has one row or one column for all."""

    SCORE: int
    ONE_ROW: bool
    ONE_COLUMN: bool


class Broadcast(NamedTuple):
    """Hold a bias's shape, its tiles, and how much each of them serves. Each number is 2 n + 1, as in `Packed`."""

    heads: object
    rows: object
    columns: object
    tiles_r: object
    tiles_c: object
    h_each: object
    """Counts heads; the next ones count tiles of S, down and across."""
    r_each: object
    c_each: object


@triton.jit(do_not_specialize=["dBias", "variant", "M", "N", "H", "b_each", "sizes", "stride"])
def attention_backward_dbias(
    Q, K, V, dO, scratch, dBias, variant, unit, M, N, H, b_each, sizes, stride,
    bias: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a bias: one program owns a tile of it and sums what the bias was broadcast over.

    Each tile serves b_each batch entries. There are no atomics, so its bits repeat. Scratch has `stride` numbers a
    head. b_each is no part of `sizes`, where it would cost sm_100 a spill.
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    heads, tiles_r, tiles_c = sizes.heads >> 1, sizes.tiles_r >> 1, sizes.tiles_c >> 1
    h_each, r_each, c_each = sizes.h_each >> 1, sizes.r_each >> 1, sizes.c_each >> 1
    program = tl.program_id(0)
    t_c, t_r = program % tiles_c, program // tiles_c % tiles_r
    h0, b0 = program // tiles_c // tiles_r % heads, program // tiles_c // tiles_r // heads
    i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    acc = tl.zeros([B_R, B_C], tl.float32)
    for x in range(b_each * h_each * r_each * c_each):
        i0, j0 = (t_r + x // c_each % r_each) * B_R, (t_c + x % c_each) * B_C
        h, b = h0 + x // c_each // r_each % h_each, b0 + x // c_each // r_each // h_each
        q = load_left(block(Q, b, h, 0, B_R, d), i0, M, True, PRECISION)  # (B_r, d)
        do = load_left(block(dO, b, h, 0, B_R, d_v), i0, M, True, PRECISION)  # (B_r, d_v)
        k = load_right(block(K, b, h // G, 0, B_C, d), j0, N, True, PRECISION)  # (d, B_c)
        v = load_right(block(V, b, h // G, 0, B_C, d_v), j0, N, True, PRECISION)  # (d_v, B_c)
        logs = load_row_values(row_values(scratch.logs, None, b, h, H, 0, stride), i0, B_R, M, float("inf"), True)
        delta = load_row_values(row_values(scratch.delta, None, b, h, H, 0, stride), i0, B_R, M, 0.0, True)
        S = product(q, k, PRECISION)  # (B_r, B_c)
        dP = product(do, v, PRECISION)  # (B_r, B_c)
        place = Place(b, h, b * H + h, i0, M, N, N - M)
        EXACT: tl.constexpr = q[0].dtype == tl.float32
        logs, delta = logs[:, None], delta[:, None]
        acc += scores_gradient(S, dP, logs, delta, place, variant, unit, i, j0, j, EXACT, True, bias.SCORE + 1)[1]
    if bias.ONE_ROW:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), acc.shape)
    if bias.ONE_COLUMN:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), acc.shape)
    i, j = t_r * B_R + i, t_c * B_C + j
    at = origin(dBias, b0, h0, 0) + i.to(tl.int64) * dBias.row + j
    tl.store(at, acc.to(dBias.ptr.dtype.element_ty), mask=(i < sizes.rows >> 1) & (j < sizes.columns >> 1))
