"""Compute the online softmax of a transposed tile, whose rows are keys and whose columns are rows of queries.

A maximum over keys would pass through all warps of the program, and every tile would wait for it. So a row max stays
until an exponent grows beyond GROWTH, as in FlashAttention-4 (Zadouri et al. 2026): P is then at most 2^GROWTH, which
16 bits hold as exactly as 1. Most tiles only ask, by a vote in each warp, and leave O as it is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.softmax import larger

GROWTH = gl.constexpr(8.0)
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The row max of no key: finite, so that no difference from it is NaN."""


@gluon.jit
def flags_of_warps():
    """Allocate what `above` writes: a word for each thread."""
    return gl.allocate_shared_memory(gl.int32, [4, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def by_thread(x):
    """Reshape a tile so that a thread has all entries of axes 0, 2, 4 and 6; the others are warps and lanes."""
    return x.reshape([x.shape[0] // 64, 4, 2, 8, x.shape[1] // 8, 4, 2])


@gluon.jit
def sums_of_threads(x):
    """Sum what a thread has of each row of queries."""
    return gl.sum(gl.sum(by_thread(x), 2), 0)


@gluon.jit
def online(S, o, m, l, c, flags):
    """Return P of the next key tile, and o, m and l as they then are. S and P: (B_c, B_r), fp32. o: pieces of
    (columns, B_r). m: (B_r,), in base 2. l: what each thread has summed. c turns S into base 2."""
    if above(S * c - m[None, :], flags):
        before = m
        m = gl.maximum(m, gl.max(S, 0) * c)
        alpha = gl.exp2(before - m)
        of_l: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
        l *= gl.convert_layout(alpha.reshape([l.shape[2], 4, 2]), of_l)[None, None, :, :, :]
        o = rescaled(o, alpha)
    P = gl.exp2(S * c - m[None, :])
    return P, o, m, l + sums_of_threads(P)


@gluon.jit
def above(x, flags):
    """Tell whether an entry of any warp is above GROWTH, or NaN."""
    top = gl.reduce(gl.reduce(gl.reduce(gl.reduce(by_thread(x), 6, larger), 4, larger), 2, larger), 0, larger)
    VOTE: gl.constexpr = (
        "{.reg .pred any; setp.gtu.f32 any, $1, $2; vote.sync.any.pred any, any, 0xffffffff; selp.b32 $0, 1, 0, any;}"
    )
    flags.store(gl.inline_asm_elementwise(VOTE, "=r,f,f", [top, GROWTH], dtype=gl.int32, is_pure=False, pack=1))
    layout: gl.constexpr = gl.BlockedLayout([4, 1, 1], [1, 8, 4], [1, 4, 1], [2, 1, 0])
    of_warps = flags.slice(0, 1, 1).slice(0, 1, 2).load(layout)
    return gl.max(gl.max(gl.max(of_warps, 2), 1), 0) > 0


@gluon.jit
def rescaled(pieces, alpha):
    """Multiply each row of queries by its factor."""
    found = ()
    for n in gl.static_range(len(pieces)):
        found += (pieces[n] * gl.convert_layout(alpha, gl.SliceLayout(0, pieces[n].type.layout))[None, :],)
    return found


@gluon.jit
def totals(m, l):
    """Return each row's max, -inf where no key was seen, and its sum over all threads."""
    l = gl.sum(gl.sum(l, 0), 0).reshape([m.shape[0]])
    return gl.where(m == LOWEST, float("-inf"), m), gl.convert_layout(l, m.type.layout)
