"""Compute the gradient of a bias in a separate kernel, since only it sums over what a bias is broadcast over."""

import triton
import triton.language as tl

from .blocks import block, load_row_values
from .factors import load_left, load_right, product
from .gradients import scores_gradient
from .ranges import Place
from .rows import origin, row_values


@triton.jit(
    do_not_specialize=[
        "dBias", "variant", "M", "N", "H", "rows", "columns", "heads", "tiles_r", "tiles_c",
        "b_each", "h_each", "r_each", "c_each", "stride",
    ]
)  # fmt: skip
def attention_backward_dbias(
    Q, K, V, dO, L, D, dBias, variant, unit, M, N, H, rows, columns, heads, tiles_r, tiles_c,
    b_each, h_each, r_each, c_each, stride,
    WHICH: tl.constexpr, ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr, G: tl.constexpr, d: tl.constexpr,
    d_v: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of score WHICH, a bias: one program owns a tile of it and sums what the bias was broadcast
    over.

    The bias has `heads` heads, `rows` rows and `columns` columns. Each of its tiles serves b_each batch entries, h_each
    heads, and r_each by c_each tiles of S. There are no atomics, so its bits repeat. L and D have `stride` numbers a
    head.
    """
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
        logs = load_row_values(row_values(L, None, b, h, H, 0, stride), i0, B_R, M, float("inf"), True)
        delta = load_row_values(row_values(D, None, b, h, H, 0, stride), i0, B_R, M, 0.0, True)
        S = product(q, k, PRECISION)  # (B_r, B_c)
        dP = product(do, v, PRECISION)  # (B_r, B_c)
        place = Place(b, h, b * H + h, i0, M, N, N - M)
        EXACT: tl.constexpr = q[0].dtype == tl.float32
        logs, delta = logs[:, None], delta[:, None]
        acc += scores_gradient(S, dP, logs, delta, place, variant, unit, i, j0, j, EXACT, True, WHICH + 1)[1]
    if ONE_ROW:
        acc = tl.broadcast_to(tl.sum(acc, 0, keep_dims=True), acc.shape)
    if ONE_COLUMN:
        acc = tl.broadcast_to(tl.sum(acc, 1, keep_dims=True), acc.shape)
    i, j = t_r * B_R + i, t_c * B_C + j
    at = origin(dBias, b0, h0, 0) + i.to(tl.int64) * dBias.row + j
    tl.store(at, acc.to(dBias.ptr.dtype.element_ty), mask=(i < rows) & (j < columns))
