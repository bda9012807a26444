"""Compute scores with Hopper's instructions, under their names in tile/scores.py."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.scores import alibi_grad


@gluon.jit
def saturated(x, cap):
    """Compute cap tanh(x ln 2 / 2) = cap - 2 cap / (1 + 2^x). Four numbers share a reciprocal, as two could by 1 / a =
    b / (a b). The special function unit, which also computes the exponentials of the softmax, is slow. From 2^30 on
    tanh is as good as 1, and four such factors still fit. The formula cancels near 0: it loses cap 2^-23, far below
    what 16-bit inputs carry."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, c, d, ab, cd, r, twice;
        min.NaN.f32 a, $4, 30.0;
        min.NaN.f32 b, $5, 30.0;
        min.NaN.f32 c, $6, 30.0;
        min.NaN.f32 d, $7, 30.0;
        ex2.approx.ftz.f32 a, a;
        ex2.approx.ftz.f32 b, b;
        ex2.approx.ftz.f32 c, c;
        ex2.approx.ftz.f32 d, d;
        add.f32 a, a, 1.0;
        add.f32 b, b, 1.0;
        add.f32 c, c, 1.0;
        add.f32 d, d, 1.0;
        mul.f32 ab, a, b;
        mul.f32 cd, c, d;
        mul.f32 r, ab, cd;
        rcp.approx.ftz.f32 r, r;
        mul.f32 twice, $8, -2.0;
        mul.f32 r, r, twice;
        mul.f32 cd, r, cd;
        mul.f32 ab, r, ab;
        fma.rn.f32 $0, cd, b, $8;
        fma.rn.f32 $1, cd, a, $8;
        fma.rn.f32 $2, ab, d, $8;
        fma.rn.f32 $3, ab, c, $8;
        }""",
        "=f,=f,=f,=f,f,f,f,f,f,f,f,f", [x, cap], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def softcap_fn(S, unit, at, cap):
    """Return cap tanh(S unit / cap)."""
    return saturated(S * (2.8853900817779268 * unit / cap), cap)


@gluon.jit
def softcap_grad(dS, S, T, unit, at, cap):
    """Multiply dS by 1 - tanh^2. T, which comes from P, may be a little above cap."""
    t = T * (1.0 / cap)
    return dS * tl.maximum(1.0 - t * t, 0.0)


@triton.jit
def alibi_fn(S, unit, at, slopes, batch, head):
    """Return S unit - slope |i - j|. Distances are exact to 16M tokens, and what differs by tile is turned into fp32
    once."""
    slope = tl.load(slopes + at.b * batch + at.h * head).to(tl.float32)
    return S * unit - slope * tl.abs((at.i0 - at.j0).to(tl.float32) + (at.i - at.j).to(tl.float32))


@triton.jit
def alibi_past_fn(S, unit, at, slopes, batch, head):
    """Return the same where the mask hides every key after its query: i - j needs no absolute value, and takes a
    multiply-add."""
    slope = tl.load(slopes + at.b * batch + at.h * head).to(tl.float32)
    return S * unit - (slope * (at.i0 - at.j0).to(tl.float32) + slope * (at.i - at.j).to(tl.float32))


alibi_past_grad = alibi_grad
