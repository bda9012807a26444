"""The portable forward with a choice of what it sums in, when it divides and how it takes exponents.

One program owns a tile of queries, as in triton/forward.py, with the same functions for masks, rows and lists of tiles.
"""
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.tile.blocks import block, load_rows, store_rows
from tilewise.tile.masks import visible
from tilewise.tile.ranges import Place, key_range, list_at, partial_at, tile_at
from tilewise.tile.rows import rows_of
from tilewise.tile.schedule import assign
from tilewise.tile.softmax import finalize, row_max

from . import rounded

LARGEST = tl.constexpr(rounded.LARGEST)
MARGIN = tl.constexpr(rounded.MARGIN)


class Sums(NamedTuple):
    """What differs from the product's kernel, fixed when the kernel is compiled."""

    S: str
    """What S = Q K^T is summed in: "fp32" or "fp16"."""
    O: str
    """What O += P V is summed in."""
    in_loop: bool
    """Whether each tile divides by the row sum so far, instead of one division at the end."""
    exp2: str
    """"fp32", "halves" (packed, two at a time) or "rounded" (the same roundings where there is no such instruction)."""


@triton.jit
def exponentials(x, KIND: tl.constexpr):
    """Compute exp2 in fp32, or in fp16 from an exponent that is rounded to fp16 first."""
    if KIND == "fp32":
        return tl.exp2(x)
    elif KIND == "rounded":
        return tl.exp2(x.to(tl.float16).to(tl.float32)).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.f16x2 $0, $1;", "=r,r", [x.to(tl.float16)], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def rescaled(acc, factor):  # (B_r, d_v), (B_r,)
    """Multiply the older sum by a factor of its row, in the wider of both types."""
    return (acc * factor[:, None]).to(acc.dtype)


@triton.jit
def step(j, q, acc, m, l, K, V, place, variant, c, lower, sums: tl.constexpr, MASKED: tl.constexpr):
    """Compute one key tile: S = Q K^T and its mask, the online softmax with lowered exponents, O += P V."""
    B_R: tl.constexpr = q.shape[0]
    B_C: tl.constexpr = K.at.shape[0]
    SCORES: tl.constexpr = tl.float16 if sums.S == "fp16" else tl.float32
    VALUES: tl.constexpr = acc.dtype
    IN_LOOP: tl.constexpr = sums.in_loop
    EXP2: tl.constexpr = sums.exp2
    j0 = j * B_C
    k = load_rows(K, j0, place.N, MASKED)  # (B_c, d)
    S = tl.dot(q, k.T, out_dtype=SCORES).to(tl.float32)  # (B_r, B_c)
    if MASKED:
        i = place.i0 + tl.arange(0, B_R)[:, None] + place.shift
        columns = j0 + tl.arange(0, B_C)[None, :]
        seen = visible(variant.mask, place.b, place.h, i, columns) & (columns < place.N)
        S = tl.where(seen, S, float("-inf"))
    m_new, shift = row_max(tl.max(S, 1), m, c)
    # what is lost in rounding S * c - top must not lift an exponent above -lower
    top = shift + lower + tl.abs(shift) * MARGIN
    P = exponentials(S * c - top[:, None], EXP2)
    alpha = tl.exp2(m - shift)
    if IN_LOOP:
        l_new = l * alpha + tl.sum(P.to(tl.float32), 1)
        inverse = tl.where(l_new == 0.0, 0.0, 1.0 / l_new)
        P = P * inverse[:, None]
        factor = l * alpha * inverse  # fp32: rounded to fp16, its errors would add up tile by tile
    else:
        factor = alpha.to(VALUES)
        l_new = l * factor + tl.sum(P.to(tl.float32), 1)  # the same factor for both sums
    v = load_rows(V, j0, place.N, MASKED)  # (B_c, d_v)
    acc = tl.dot(P.to(v.dtype), v, rescaled(acc, factor), out_dtype=VALUES)  # (B_r, d_v)
    return acc, m_new, l_new


@triton.jit(do_not_specialize=["variant", "M", "N", "H", "heads", "section", "tiles"])
def forward(
    Q, K, V, O, variant, c, lower, M, N, H, heads, section, tiles,
    sums: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute O for every tile of queries. c turns logits into base 2.

    Every exponent is lowered by `lower`, the logarithm of the stability factor.
    """
    G: tl.constexpr = tile.G
    d: tl.constexpr = tile.d
    d_v: tl.constexpr = tile.d_v
    B_R: tl.constexpr = tile.B_R
    B_C: tl.constexpr = tile.B_C
    matrix, t = assign(tl.program_id(0), tiles, heads, section)
    b, h = matrix // H, matrix % H
    q0, M, k0, N = rows_of(None, b, M, N)
    i0 = t * B_R
    place = Place(b, h, matrix, i0, M, N, N - M)
    q = load_rows(block(Q, b, h, q0, B_R, d), i0, M, True)  # (B_r, d)
    keys, values = block(K, b, h // G, k0, B_C, d), block(V, b, h // G, k0, B_C, d_v)
    out = block(O, b, h, q0, B_R, d_v)
    VALUES: tl.constexpr = tl.float16 if sums.O == "fp16" else tl.float32
    acc = tl.zeros(out.at.shape, VALUES)
    m = tl.full([B_R], float("-inf"), tl.float32)
    l = tl.zeros([B_R], tl.float32)
    lists = list_at(variant.lists, b, h, t)
    lo, full_lo, full_hi, hi = key_range(variant, lists, place, B_R, B_C)
    for x in range(full_lo, full_hi):  # every entry is seen
        j = tile_at(variant.lists, lists, x)
        acc, m, l = step(j, q, acc, m, l, keys, values, place, variant, c, lower, sums, False)
    for x in range(full_lo - lo + hi - full_hi):  # edges of the mask, and the ragged end
        j = partial_at(variant.lists, lists, x, lo, full_lo, full_hi)
        acc, m, l = step(j, q, acc, m, l, keys, values, place, variant, c, lower, sums, True)
    o = acc.to(tl.float32)
    IN_LOOP: tl.constexpr = sums.in_loop
    if not IN_LOOP:
        inverse, _ = finalize(m, l)
        o = o * inverse[:, None]
    # an average of V is no larger than V, so a finite one beyond fp16 is a rounding; what overflowed stays inf
    o = tl.where(tl.abs(o) < float("inf"), tl.minimum(tl.maximum(o, -LARGEST), LARGEST), o)
    store_rows(out, i0, M, o)
