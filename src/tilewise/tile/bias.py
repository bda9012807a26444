"""Compute the gradient of a bias in a separate kernel, since only it sums over what a bias is broadcast over."""

from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import block, load_row_values
from .factors import load_left, load_right, product
from .gradients import scores_gradient
from .ranges import Place
from .rows import origin, row_values


class BiasOperands(NamedTuple):
    """Hold the backward's operands, its variant and unit, and where the gradient goes."""

    Q: object
    K: object
    V: object
    dO: object  # noqa: N815
    L: object
    D: object
    dBias: object  # noqa: N815
    variant: object
    unit: object


class BiasTile(NamedTuple):
    """Say which score is the bias, and whether it is broadcast over rows or columns; all are constants."""

    WHICH: int
    ONE_ROW: bool
    ONE_COLUMN: bool


@triton.jit(
    do_not_specialize=[
        "x", "M", "N", "H", "rows", "columns", "heads", "tiles_r", "tiles_c",
        "b_each", "h_each", "r_each", "c_each", "stride",
    ]
)  # fmt: skip
def attention_backward_dbias(
    x, M, N, H, rows, columns, heads, tiles_r, tiles_c, b_each, h_each, r_each, c_each, stride,
    bias: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a bias: one program owns a tile of it and sums what the bias was broadcast
    over.

    The bias has `heads` heads, `rows` rows and `columns` columns. Each of its tiles serves b_each batch entries, h_each
    heads, and r_each by c_each tiles of S. There are no atomics, so its bits repeat. L and D have `stride` numbers a
    head.
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    PRECISION: tl.constexpr = tile.PRECISION
    program = tl.program_id(0)
    t_c, t_r = program % tiles_c, program // tiles_c % tiles_r
    h0, b0 = program // tiles_c // tiles_r % heads, program // tiles_c // tiles_r // heads
    i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    acc = tl.zeros([B_R, B_C], tl.float32)
    for n in range(b_each * h_each * r_each * c_each):
        i0, j0 = (t_r + n // c_each % r_each) * B_R, (t_c + n % c_each) * B_C
        h, b = h0 + n // c_each // r_each % h_each, b0 + n // c_each // r_each // h_each
        q = load_left(block(x.Q, b, h, 0, B_R, d), i0, M, True, PRECISION)  # (B_r, d)
        do = load_left(block(x.dO, b, h, 0, B_R, d_v), i0, M, True, PRECISION)  # (B_r, d_v)
        k = load_right(block(x.K, b, h // G, 0, B_C, d), j0, N, True, PRECISION)  # (d, B_c)
        v = load_right(block(x.V, b, h // G, 0, B_C, d_v), j0, N, True, PRECISION)  # (d_v, B_c)
        logs = load_row_values(row_values(x.L, None, b, h, H, 0, stride), i0, B_R, M, float("inf"), True)
        delta = load_row_values(row_values(x.D, None, b, h, H, 0, stride), i0, B_R, M, 0.0, True)
        S = product(q, k, PRECISION)  # (B_r, B_c)
        dP = product(do, v, PRECISION)  # (B_r, B_c)
        place = Place(b, h, b * H + h, i0, M, N, N - M)
        EXACT: tl.constexpr = q[0].dtype == tl.float32
        logs, delta = logs[:, None], delta[:, None]
        acc += scores_gradient(S, dP, logs, delta, place, x.variant, x.unit, i, j0, j, EXACT, True, bias.WHICH + 1)[1]
    if bias.ONE_ROW:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), acc.shape)
    if bias.ONE_COLUMN:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), acc.shape)
    i, j = t_r * B_R + i, t_c * B_C + j
    at = origin(x.dBias, b0, h0, 0) + i.to(tl.int64) * x.dBias.row + j
    tl.store(at, acc.to(x.dBias.ptr.dtype.element_ty), mask=(i < rows) & (j < columns))
