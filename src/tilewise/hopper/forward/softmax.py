"""Compute the forward's online softmax in registers: from a key tile's logits to its P, with m and l of all tiles so
far."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.masks import key_range_of, visible
from ...tile.scores import Entries, apply_scores
from ...tile.softmax import exponents, larger, rescaling, row_max
from ..parts.channel import end_block
from ..parts.threads import as_tile, by_thread, positions
from .eight_bits import positive, powers


@gluon.jit
def indices(S, place, row0, j0):
    """Return the rows (shifted) and columns of a tile of S, as they broadcast."""
    layout: gl.constexpr = S.type.layout
    i = row0 + place.shift + gl.arange(0, S.shape[0], gl.SliceLayout(1, layout))
    columns = j0 + gl.arange(0, S.shape[1], gl.SliceLayout(0, layout))
    return i[:, None], columns[None, :]


@gluon.jit
def scored(S, partial, place, row0, j0, variant):
    """Return the logits after all scores. What the mask hides is zeroed first: it may be NaN, and soft caps share a
    reciprocal."""
    if len(variant.scores) == 0:
        return S
    else:
        if partial:
            S = masked(S, place, row0, j0, variant, 0.0)
        row, first, column = positions(S)
        at = Entries(place.b, place.h, row0 + place.shift + row, 0, j0 + first, column)
        return as_tile(apply_scores(variant.scores, by_thread(S), at, len(variant.scores)), S)


@gluon.jit
def masked(S, place, row0, j0, variant, hidden: gl.constexpr = float("-inf")):
    """Return the logits where the mask shows them, else `hidden`."""
    i, columns = indices(S, place, row0, j0)
    if variant.lists is None:  # one comparison tests both bounds: before the first key, the unsigned difference wraps
        lo, hi = key_range_of(variant.mask, place.b, i, place.N)
        seen = (columns - lo).to(gl.uint32) < gl.maximum(hi - lo, 0).to(gl.uint32)
    else:
        seen = visible(variant.mask, place.b, place.h, i, columns) & (columns < place.N)
    return gl.where(seen, S, hidden)


@gluon.jit
def begin(
    S, partial, place, row0, j0, variant, c, layout: gl.constexpr, E4M3: gl.constexpr, BY_ROW: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Compute m, l and P after the first key tile; P is 0 where S has no columns. BOUNDED, m is final, and not below 0.
    Logits in base 2 are then between -80 and 80, so neither P nor its sums leave fp32's range, or bf16's."""
    S = scored(S, partial, place, row0, j0, variant)
    if partial:
        if BY_ROW:
            S, c = positive(S, c)
        S = masked(S, place, row0, j0, variant)
    EXTRA: gl.constexpr = 0 if c is None else tile.P_SCALE_LOG2
    m = gl.full([S.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, S.type.layout))
    top, _ = top_of(S, m, c, True, E4M3, tile)
    m, shift = row_max(top, m, c, EXTRA, E4M3)
    if tile.BOUNDED:
        m = gl.maximum(m, 0.0)
        shift = m
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    if tile.SUM_BY_PRODUCT:
        S = widened(S, gl.full_like(S, float("-inf")), layout)
        P = powers(S, gl.convert_layout(shift, row_layout), gl.convert_layout(c, row_layout))
        l = gl.full([S.shape[0]], 0.0, gl.float32, row_layout)
        return gl.convert_layout(m, row_layout), l, P
    else:
        P = gl.exp2(scaled(exponents(S, shift, c[:, None] if BY_ROW else c), c, tile.P_SCALE_LOG2))
        l = gl.sum(P, 1)
        rest = gl.zeros_like(P)
        if tile.PV_BITS == 8:  # all are 0 in e4m3; where equal numbers become a word, ptxas leaves a register unset
            rest += gl.arange(0, P.shape[1], gl.SliceLayout(0, P.type.layout))[None, :] * 2.0**-100
        return gl.convert_layout(m, row_layout), gl.convert_layout(l, row_layout), widened(P, rest, layout)


@gluon.jit
def widened(x, rest, layout: gl.constexpr):
    """Return a tile in a layout, followed by the columns of `rest` where it has half as many as the layout."""
    if x.type.layout != layout:
        x = gl.join(x, rest).permute((0, 2, 1)).reshape([x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(x, layout)


@gluon.jit
def scaled(x, c, P_SCALE_LOG2: gl.constexpr):
    """Return exponents for which P comes out as its product takes it. Where m is in natural log, it may be too large to
    be lowered instead."""
    if P_SCALE_LOG2 and c is None:
        return x + P_SCALE_LOG2
    else:
        return x


@gluon.jit
def exponentials(S, shift, c, y, WAIT_PV: gl.constexpr, P_SCALE_LOG2: gl.constexpr = 0):
    """Compute P = exp2 of `exponents`. Left to itself, ptxas moves the wait that follows above all exponentials."""
    if WAIT_PV == 1:
        end_block(y)
    x = scaled(exponents(S, shift, c), c, P_SCALE_LOG2)
    if WAIT_PV == 2:
        ROWS: gl.constexpr = S.shape[0]
        COLUMNS: gl.constexpr = S.shape[1]
        left, right = gl.split(x.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
        left = gl.exp2(left)
        end_block(y)
        P = gl.join(left, gl.exp2(right)).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
        return gl.convert_layout(P, S.type.layout)
    else:
        return gl.exp2(x)


@gluon.jit
def packed_exponentials(S, shift, c, y, tile: gl.constexpr):
    """Compute the same as `pack` takes it."""
    S = S.to(gl.float32)
    if tile.WAIT_PV == 1:
        end_block(y)
    if tile.WAIT_PV == 2:
        ROWS: gl.constexpr = S.shape[0]
        COLUMNS: gl.constexpr = S.shape[1]
        left, right = gl.split(S.reshape([ROWS, 2, COLUMNS // 2]).permute((0, 2, 1)))
        rows: gl.constexpr = gl.SliceLayout(1, left.type.layout)
        shift, c = gl.convert_layout(shift, rows), gl.convert_layout(c, rows)
        left = powers(left, shift, c)
        end_block(y)
        right = powers(right, shift, c)
        P = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, COLUMNS])
        return gl.convert_layout(P, S.type.layout)
    else:
        return powers(S, shift, c)


@gluon.jit
def any_below(m, E4M3: gl.constexpr, tile: gl.constexpr):
    """Tell whether a row has had negative logits alone, where `top_of` asks; m is lowered by P_SCALE_LOG2."""
    if E4M3 and tile.PROMOTE == "whole":
        return gl.min(m) < -tile.P_SCALE_LOG2
    else:
        return False


@gluon.jit
def top_of(S, m, c, below, E4M3: gl.constexpr, tile: gl.constexpr):
    """Return the tile's row max, and whether a row has had negative logits alone (`below`). With E4M3, the max is NaN
    if one is, which half of P would not show. With PROMOTE "whole" it is one of integers, in half the instructions: too
    low where all are negative, which matters only while `below`."""
    if not E4M3:
        return gl.max(S, 1), below
    elif tile.PROMOTE != "whole":
        return gl.reduce(S, 1, larger), below
    else:
        top = gl.max(S.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
        if below:
            top = larger(top, gl.max(S, 1))
            below = any_below(gl.maximum(m, top * c - tile.P_SCALE_LOG2), E4M3, tile)
        return top, below


@gluon.jit
def online(S, m, l, c, y, below, E4M3: gl.constexpr, BY_ROW: gl.constexpr, tile: gl.constexpr):
    """Compute P of the next key tile, m and l with it, the factor that rescales O so far (1 if m is final), and `below`
    (see `top_of`). BY_ROW says whether c is a factor for each row."""
    if tile.BOUNDED:
        P = exponentials(S, m, c, y, tile.WAIT_PV, tile.P_SCALE_LOG2)
        return P, m, l + gl.sum(P, 1), 1.0, below
    else:
        EXTRA: gl.constexpr = 0 if c is None else tile.P_SCALE_LOG2
        top, below = top_of(S, m, c, below, E4M3, tile)
        m_new, shift = row_max(top, m, c, EXTRA, E4M3)
        if tile.SUM_BY_PRODUCT:
            P = packed_exponentials(S, shift, c, y, tile)
            alpha = rescaling(m, shift, c)
            return P, m_new, l, alpha, below
        else:
            P = exponentials(S.to(gl.float32), shift, c[:, None] if BY_ROW else c, y, tile.WAIT_PV, tile.P_SCALE_LOG2)
            alpha = rescaling(m, shift, c)
            return P, m_new, l * alpha + gl.sum(P, 1), alpha, below
