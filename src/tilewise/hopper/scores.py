"""Scores that Hopper computes in its own way, under their names in tile/scores.py."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def logistic(x):
    """1 / (1 + 2^x) to a few units in the last place. Four numbers share a reciprocal, as two could by 1 / a =
    b / (a b): the special unit, which also computes the exponentials of the softmax, is the limit. From 2^30 on the
    result is as good as 0, and four such factors still fit."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, c, d, ab, cd, r;
        min.NaN.f32 a, $4, 0f41F00000;
        min.NaN.f32 b, $5, 0f41F00000;
        min.NaN.f32 c, $6, 0f41F00000;
        min.NaN.f32 d, $7, 0f41F00000;
        ex2.approx.ftz.f32 a, a;
        ex2.approx.ftz.f32 b, b;
        ex2.approx.ftz.f32 c, c;
        ex2.approx.ftz.f32 d, d;
        add.f32 a, a, 0f3F800000;
        add.f32 b, b, 0f3F800000;
        add.f32 c, c, 0f3F800000;
        add.f32 d, d, 0f3F800000;
        mul.f32 ab, a, b;
        mul.f32 cd, c, d;
        mul.f32 r, ab, cd;
        rcp.approx.ftz.f32 r, r;
        mul.f32 cd, r, cd;
        mul.f32 ab, r, ab;
        mul.f32 $0, cd, b;
        mul.f32 $1, cd, a;
        mul.f32 $2, ab, d;
        mul.f32 $3, ab, c;
        }""",
        "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def softcap_fn(S, b, h, i, j, cap):
    """cap tanh(S / cap), where tanh x = 1 - 2 / (1 + exp 2x). It cancels near 0: cap 2^-23 is lost, far below what
    16-bit inputs carry."""
    return cap - 2.0 * cap * logistic(S * (2.8853900817779268 / cap))


@gluon.jit
def softcap_grad(dS, S, b, h, i, j, cap):
    """1 - tanh^2 = 4 r (1 - r)."""
    r = logistic(S * (2.8853900817779268 / cap))
    return dS * (4.0 * (r - r * r))


@triton.jit
def alibi_fn(S, b, h, i, j, slopes, batch, head):
    """S - slope |i - j|: exact to 16M tokens in fp32, where positions become numbers once a row and once a column."""
    slope = tl.load(slopes + b * batch + h * head).to(tl.float32)
    return S - slope * tl.abs(i.to(tl.float32) - j.to(tl.float32))
