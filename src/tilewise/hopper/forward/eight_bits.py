"""Multiply 8-bit codes: their scales, and P as e4m3 in words of four.

A thread holds columns 8 i + 2 r + e of S, where r is its number among four. As a left factor of 8 bits it must hold
columns 16 h + 4 r + 2 b + e. V's keys are permuted inside each 16, so that column 16 h + 8 b + 2 r + e of P meets its
row of V there. No entry then moves between threads (`quantize.codes` writes V so).

The loop carries P as words: of single bytes, LLVM would keep each in a register.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...quantize.rows import BLOCK_K, BLOCK_Q
from ..parts import triton_compat
from ..parts.channel import expect, stage
from ..parts.pieces import allocate, bytes_of, load_pieces, scaled

TINY = gl.constexpr(2.0**-126)


class Codes(NamedTuple):
    """Hold the scales of codes, and how many blocks a head has, as 2 n + 1."""

    q_scale: object
    """Holds one of each row of Q, in blocks; K has one of each block."""
    q_shift: object
    """Holds what each row's lse misses."""
    k_scale: object
    v_scale: object
    """Holds one of each tile of V, or None where V has 16 bits."""
    q_blocks: object
    k_blocks: object


@gluon.jit
def first_rows(place, q0, k0, packed, tile: gl.constexpr):
    """Return the first rows of a sequence's queries and keys in memory. As codes, each sequence begins with a block."""
    if tile.QK_BITS == 16 or packed is None:
        return q0, k0
    else:
        return (q0 // BLOCK_Q + place.b) * BLOCK_Q, (k0 // BLOCK_K + place.b) * BLOCK_K


@gluon.jit
def values(V, STAGES: gl.constexpr, tile: gl.constexpr):
    """Allocate the stages of a tile of V: codes are transposed."""
    if tile.PV_BITS == 8:
        return (gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, tile.D_V, tile.B_C], V.layout),)
    else:
        return allocate(V, V.dtype, STAGES, tile.B_C, tile.D_V)


@gluon.jit
def load_values(V, channel, y, b, h_k, row, code_row, column, tile: gl.constexpr):
    """Load the values of keys from `row` on into use y's stage, from `column` on; as codes, from `code_row` on, which
    lie in tiles of BLOCK_K keys."""
    if tile.PV_BITS == 8:
        bar = expect(channel.full, y, V.block_type.nbytes)
        at = [b, h_k, code_row // BLOCK_K * tile.D_V, code_row % BLOCK_K]
        triton_compat.load(V, at, bar, stage(channel.memory[0], y))
    else:
        bar = expect(channel.full, y, bytes_of(V.block_type, tile.D_V))
        load_pieces(V, b, h_k, row, bar, channel.memory, y % tile.KV_STAGES, column)


@gluon.jit
def scale_at(scales, matrix, blocks, row, BLOCK: gl.constexpr):
    """Return the scale of the block that holds a row of a matrix, which has `blocks`, given as 2 n + 1."""
    return gl.load(scales + matrix * (blocks >> 1) + row // BLOCK)


@gluon.jit
def pack(P, LINES: gl.constexpr):
    """Round P to e4m3, four in a word. With LINES, the last two of each four are bits already (see `powers`)."""
    ROWS: gl.constexpr = P.shape[0]
    COLUMNS: gl.constexpr = P.shape[1]
    P = P.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS // 4, 2, 2])
    even, odd = gl.split(P)
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    if LINES:
        PTX: gl.constexpr = (
            "{.reg .b16 a, b, t; .reg .b32 w; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; mad.lo.u32 w, $4, 256, $3;"
            "mov.b32 {b, t}, w; mov.b32 $0, {a, b};}"
        )
        p2, p3 = p2.to(gl.int32, bitcast=True), p3.to(gl.int32, bitcast=True)
        return gl.inline_asm_elementwise(PTX, "=r,f,f,r,r", [p0, p1, p2, p3], dtype=gl.int32, is_pure=True, pack=1)
    else:
        PTX: gl.constexpr = (
            "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
            "mov.b32 $0, {a, b};}"
        )
        return gl.inline_asm_elementwise(PTX, "=r,f,f,f,f", [p0, p1, p2, p3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def line(S, c, shift):
    """Return the e4m3 bits of 2^(c S - shift) in the lowest byte: a line between powers of two (Schraudolph 1999).

    The bits of 2^x are 8 (x + 7), where LIFT centres the line around the exponential. Its error is 3.1 % rms, that of
    rounding to e4m3 2.6 %. What is too small, or NaN, becomes 0 (see `with_nan`).
    """
    LIFT: gl.constexpr = 0.058
    c = gl.full_like(S, 0.0) + c * 0.0625
    shift = gl.full_like(S, 0.0) + ((7.0 - LIFT) / 16.0 - shift * 0.0625)
    bits = gl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [S, c, shift], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.fma(bits, gl.full_like(bits, 128.0), gl.full_like(bits, 12582912.0))  # 1.5 * 2^23


@gluon.jit
def powers(S, shift, c):
    """Return 2^(c S - shift), for half of the entries as `line` gives it. The special function unit, which computes
    exponentials, would else be the limit."""
    ROWS: gl.constexpr = S.shape[0]
    COLUMNS: gl.constexpr = S.shape[1]
    left, right = gl.split(S.reshape([ROWS, COLUMNS // 16, 2, 8]).permute((0, 1, 3, 2)))
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout))
    shift = gl.convert_layout(shift, rows)[:, None, None]
    c = gl.convert_layout(c, rows)[:, None, None]
    P = gl.join(gl.exp2(left * c - shift), line(right, c, shift))
    return gl.convert_layout(P.permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS]), S.type.layout, assert_trivial=True)


@gluon.jit
def unpack(word, layout: gl.constexpr):
    """Return words of P as a left factor; no instruction."""
    b0, b1, b2, b3 = word.to(gl.int8), (word >> 8).to(gl.int8), (word >> 16).to(gl.int8), (word >> 24).to(gl.int8)
    p = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([word.shape[0], 4 * word.shape[1]])
    return gl.convert_layout(p, layout).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def ones_of(COLUMNS: gl.constexpr):
    """Return a tile of ones."""
    ONE: gl.constexpr = 0x38  # in e4m3
    ones = gl.full([8, COLUMNS], ONE, gl.int8, gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    return ones.to(gl.float8e4nv, bitcast=True)


class RowScales(NamedTuple):
    """Hold what 64 rows of codes need: their scales, what their lse miss, and where the scales of their keys are."""

    scale: object
    lse_shift: object
    matrix: object
    k_row: object


@gluon.jit
def row_scales(codes, place, row0, q0, k0, call, layout: gl.constexpr, tile: gl.constexpr):
    """Return the `RowScales` of the rows from row0 on, unless Q has 16 bits. `layout` is that of S."""
    if tile.QK_BITS == 16:
        return RowScales(0, 0, 0, 0)
    else:
        q_row, k_row = first_rows(place, q0, k0, call.packed, tile)
        matrix = place.matrix if call.packed is None else place.h
        rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        at = (matrix * (codes.q_blocks >> 1) + q_row // BLOCK_Q) * BLOCK_Q + rows
        scale = gl.load(codes.q_scale + at, mask=rows < place.M, other=0.0)
        shift = gl.load(codes.q_shift + at, mask=rows < place.M, other=0.0)
        return RowScales(scale, shift, matrix // call.shape.group, k_row)


@gluon.jit
def key_scales(codes, rows, j, tile: gl.constexpr):
    """Return the scales of key tile j's K and V, or 1 where they have 16 bits."""
    if tile.QK_BITS == 16:
        return 1.0, 1.0
    else:
        row = rows.k_row + j * tile.B_C
        k = scale_at(codes.k_scale, rows.matrix, codes.k_blocks, row, BLOCK_K)
        v = scale_at(codes.v_scale, rows.matrix, codes.k_blocks, row, BLOCK_K) if tile.PV_BITS == 8 else 1.0
        return k, v


@gluon.jit
def rescaled(alpha, before, after, tile: gl.constexpr):
    """Return O's factor alpha, where O is in units of V's scale: from that of the key tile before to the next one's."""
    return alpha * (before / after) if tile.PV_BITS == 8 else alpha


@gluon.jit
def product_of(S, rows, k_scale, SCORES: gl.constexpr, FLOAT: gl.constexpr, tile: gl.constexpr):
    """Return the logits of codes where scores take them; else their product, in FLOAT or as it is."""
    if tile.QK_BITS == 8 and SCORES:
        return descaled(S, rows.scale * k_scale)
    else:
        return S.to(gl.float32) if FLOAT else S


@gluon.jit
def scale_of(S, c, scale):
    """Return what turns the codes' S into logits in base 2: a factor for each row."""
    return c * gl.convert_layout(scale, gl.SliceLayout(1, S.type.layout))


@gluon.jit
def descaled(S, scale):
    """Return the logits, which scores take as they are."""
    return S.to(gl.float32) * gl.convert_layout(scale, gl.SliceLayout(1, S.type.layout))[:, None]


@gluon.jit
def positive(S, c):
    """Return S and a factor of its rows above 0, so that a mask's -inf stays -inf: what was NaN is inf in S instead,
    and 0 becomes so small a number that every logit is 0."""
    return gl.where((c >= 0.0)[:, None], S.to(gl.float32), float("inf")), gl.where(c > 0.0, c, TINY)


@gluon.jit
def in_units(o, l, v_scale, c, tile: gl.constexpr):
    """Return O and row sums in their own units, where V has the last key tile's scale. Without c, m is that of P
    itself."""
    if tile.PV_BITS == 8:
        o = scaled(o, v_scale)
        if c is None:
            o, l = scaled(o, 2.0**-tile.P_SCALE_LOG2), l * 2.0**-tile.P_SCALE_LOG2
    return o, l


@gluon.jit
def with_nan(l, m):
    """Return row sums, NaN where `positive` showed m an inf: `line` may have taken it for 0."""
    return gl.where(m < float("inf"), l, float("nan"))
