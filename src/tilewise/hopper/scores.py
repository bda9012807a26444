"""Scores that Hopper computes in its own way, under their names in tile/scores.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def logistic(x):
    """1 / (1 + 2^x) to two units in the last place: two instructions of the special unit and an addition."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 1.0; rcp.approx.ftz.f32 $0, $0;",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
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
