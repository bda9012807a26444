"""Compute the online softmax (Milakov & Gimelshein 2018) and what the backward needs of it."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, or NaN if one is."""
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def row_max(top, m, c, P_SCALE_LOG2: tl.constexpr = 0, KEEP_NAN: tl.constexpr = False):
    """Return the new row max in base 2, and what exponents subtract: the same, but 0 where no key was seen yet. `top`
    is the tile's own; c is a factor, or one for each row. With a P_SCALE_LOG2, the maximum is lowered by it, so that P
    comes out 2^P_SCALE_LOG2 times as large. With KEEP_NAN, NaN stays.

    m is kept as the rounded c * max(S) that the exponents really use, so that alpha is exactly 1 while m stays. A
    factor off by one bit would be applied once per tile, and long rows would drift.

    Without c, m is in natural log, and exact. Logits with a bias need that. The product of its largest numbers with
    log2 e is inf. Of smaller ones it is so large that what is rounded off would be an exponent by itself.
    """
    if c is not None:
        top = top * c
    if P_SCALE_LOG2:
        top -= P_SCALE_LOG2
    m_new = larger(m, top) if KEEP_NAN else tl.maximum(m, top)
    return m_new, tl.where(m_new == float("-inf"), 0.0, m_new)  # a row without keys must not give inf - inf


@triton.jit
def exponents(S, shift, c):  # (B_r, B_c), (B_r,), scalar or None
    """Return c S - shift; without c, S - shift converted to base 2."""
    return (S - shift[:, None]) * LOG2E if c is None else S * c - shift[:, None]


@triton.jit
def rescaling(m, shift, c):
    """Return the factor that rescales older sums from their row max to the new one."""
    return tl.exp2((m - shift) * LOG2E if c is None else m - shift)


@triton.jit
def online_softmax(S, m, l, c):  # (B_r, B_c), (B_r,), (B_r,), scalar or None
    """Return P = exp2(c S - m_new), the factor that rescales older sums, and the new row max and row sum."""
    m_new, shift = row_max(tl.max(S, 1), m, c)
    P = tl.exp2(exponents(S, shift, c))
    alpha = rescaling(m, shift, c)
    return P, alpha, m_new, l * alpha + tl.sum(P, 1)


@triton.jit
def log2(x):
    """Return log2 of a positive number, as a whole number and a rest in [0, 1): the hardware's own errs by 2^-22 of the
    result."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = (bits & 0x007FFFFF | 0x3F800000).to(tl.float32, bitcast=True)  # in [1, 2)
    whole = ((bits >> 23) - 127).to(tl.float32)
    return whole, tl.where(x < float("inf"), tl.log2(mantissa), x)  # NaN stays


@triton.jit
def natural(m, l, NATURAL: tl.constexpr):  # (B_r,), (B_r,)
    """Return (m + log2 l) ln 2, rounded once: what is lost in the sum of m and l's exponent (Knuth's two-sum) is put
    back. If m is NATURAL, return m + ln l."""
    whole, rest = log2(l)
    if NATURAL:
        return m + tl.fma(whole, LN2, rest * LN2)
    else:
        sum = m + whole
        back = sum - m
        lost = (m - (sum - back)) + (whole - back)
        return tl.fma(sum, LN2, (lost + rest) * LN2)


@triton.jit
def finalize(m, l, NATURAL: tl.constexpr = False):  # (B_r,), (B_r,)
    """Return the factor by which the sum becomes O, and lse in natural log; 0 and -inf for a row without keys."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    # l tells an empty row (0) from one whose logits are all NaN, which a maximum does not see
    L = tl.where((m == float("-inf")) & (l == 0.0), float("-inf"), natural(m, l_safe, NATURAL))
    return 1.0 / l_safe, L


@triton.jit
def join_sink(m, l, sink, NATURAL: tl.constexpr = False):  # (B_r,), (B_r,), scalar logit
    """Return m, l and the rescale factor once a key of value 0 and logit `sink` has joined the sum."""
    c: tl.constexpr = None if NATURAL else LOG2E
    m_new = tl.maximum(m, sink if NATURAL else sink * LOG2E)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = rescaling(m, shift, c)
    return m_new, l * alpha + tl.exp2((sink - shift) * LOG2E if NATURAL else sink * LOG2E - shift), alpha


@triton.jit
def for_backward(L, EXACT: tl.constexpr):  # (B_r,)
    """Return lse as `probabilities` takes it: in base 2, or EXACT in natural log; 0 for a row without keys.

    Converting L to base 2 rounds a large number, which costs fp32 its accuracy. There the difference
    is converted instead.
    """
    return tl.where(L == float("-inf"), 0.0, L if EXACT else L * LOG2E)


@triton.jit
def probabilities(S, L, unit, EXACT: tl.constexpr):  # (B_r, B_c), L broadcast to it, scalar
    """Return P = exp(S - lse), from L = for_backward(lse) and logits that `unit` converts to L's base."""
    x = S * unit - L
    return tl.exp2(x * LOG2E if EXACT else x)
