"""Device side of score.py. Each score is a pair.

fn(S, unit, b, h, i, j, *captured)        the logits that leave; S unit are those that entered
grad(dS, S, unit, b, h, i, j, *captured)  the gradient with respect to S unit
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Part(NamedTuple):
    """One score: its device pair and what it captured."""

    fn: tl.constexpr
    grad: tl.constexpr
    unit: object
    """The softmax scale for the first score, which S enters as it is; 1 for those after it."""
    captured: tuple


@triton.jit
def applied(score, S, b, h, i, j):
    """The logits that leave one score."""
    return score.fn(S, score.unit, b, h, i, j, *score.captured)


@triton.jit
def pulled(score, dS, S, b, h, i, j):
    """The gradient of what entered it."""
    return score.grad(dS, S, score.unit, b, h, i, j, *score.captured)


@triton.jit
def through(scores, S, b, h, i, j, COUNT: tl.constexpr):
    """The logits after the first COUNT scores."""
    for p in tl.static_range(COUNT):
        S = applied(scores[p], S, b, h, i, j)
    return S


@triton.jit
def back(scores, dS, S, b, h, i, j, STOP: tl.constexpr):
    """The gradient of the logits that entered score STOP, from that of the last; S entered the first."""
    for n in tl.static_range(len(scores) - STOP):
        S_in = through(scores, S, b, h, i, j, len(scores) - 1 - n)
        dS = pulled(scores[len(scores) - 1 - n], dS, S_in, b, h, i, j)
    return dS


@triton.jit
def tanh(x):
    """To 2 units in the last place: the exponential form cancels near 0, a series takes over there."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2 |x|)
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = 1.0 + x2 * (
        -0.3333333333 + x2 * (0.1333333333 + x2 * (-0.0539682540 + x2 * (0.0218694885 - x2 * 0.0088632355)))
    )
    return tl.where(x2 < 0.0625, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def softcap_fn(S, unit, b, h, i, j, cap):
    """cap tanh(S unit / cap)."""
    return cap * tanh(S * unit / cap)


@triton.jit
def softcap_grad(dS, S, unit, b, h, i, j, cap):
    """1 - tanh^2."""
    t = tanh(S * unit / cap)
    return dS * (1.0 - t * t)


@triton.jit
def alibi_fn(S, unit, b, h, i, j, slopes, batch, head):
    """S unit - slope |i - j|."""
    slope = tl.load(slopes + b * batch + h * head).to(tl.float32)
    return S * unit - slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def alibi_grad(dS, S, unit, b, h, i, j, slopes, batch, head):
    """The slope does not depend on S."""
    return dS


@triton.jit
def bias_fn(S, unit, b, h, i, j, bias, batch, head, row_stride, entry, M, N):
    """S unit + bias."""
    row = i - (N - M)
    at = b.to(tl.int64) * batch + h.to(tl.int64) * head + row.to(tl.int64) * row_stride + j.to(tl.int64) * entry
    return S * unit + tl.load(bias + at, mask=(row >= 0) & (row < M) & (j < N), other=0.0).to(tl.float32)


@triton.jit
def bias_grad(dS, S, unit, b, h, i, j, bias, batch, head, row_stride, entry, M, N):
    """The bias does not depend on S."""
    return dS
