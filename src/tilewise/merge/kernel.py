"""Merge partial results over disjoint sets of keys: a program joins some rows of one head, and reads each part once."""

import triton
import triton.language as tl

from ..tile.rows import origin


@triton.jit(do_not_specialize=["M", "H", "tiles"])
def attention_merge(O, L, parts, M, H, tiles, D: tl.constexpr, B_R: tl.constexpr, B_D: tl.constexpr):
    """Write o and lse of all parts to O and L, which may be a part's. `parts` holds rows of o and of lse."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows, entries = tl.arange(0, B_R), tl.arange(0, B_D)
    inside = t * B_R + rows < M
    exists = inside[:, None] & (entries[None, :] < D)
    acc = tl.zeros([B_R, B_D], tl.float32)
    m, l = tl.full([B_R], float("-inf"), tl.float32), tl.zeros([B_R], tl.float32)
    for n in tl.static_range(len(parts)):
        X, lse = parts[n]
        lse = tl.load(origin(lse, b, h, t * B_R) + rows, mask=inside, other=float("-inf"))
        x = tl.load(origin(X, b, h, t * B_R) + rows.to(tl.int64)[:, None] * X.row + entries[None, :], exists, other=0.0)
        m_new = tl.maximum(m, lse)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp(m - shift), tl.exp(lse - shift)
        acc = acc * alpha[:, None] + x.to(tl.float32) * weight[:, None]  # (B_r, d_v)
        l = l * alpha + weight
        m = m_new
    l_or_1 = tl.where(l == 0.0, 1.0, l)
    to = origin(O, b, h, t * B_R) + rows.to(tl.int64)[:, None] * O.row + entries[None, :]
    tl.store(to, (acc / l_or_1[:, None]).to(O.ptr.dtype.element_ty), exists)
    tl.store(origin(L, b, h, t * B_R) + rows, tl.where(l == 0.0, float("-inf"), m + tl.log(l_or_1)), inside)
