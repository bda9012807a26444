"""The online softmax (Milakov & Gimelshein 2018) and what the backward needs of it."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(S, m, l, c):  # (B_r, B_c), (B_r,), (B_r,), scalar
    """P = exp2(c S - c m_new), the factor that rescales older sums, and the new row max and row sum."""
    m_new = tl.maximum(m, tl.max(S, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new * c)  # a row without keys must not give inf - inf
    P = tl.exp2(S * c - shift[:, None])
    alpha = tl.exp2(m * c - shift)
    return P, alpha, m_new, l * alpha + tl.sum(P, 1)


@triton.jit
def finalize(m, l, c):  # (B_r,), (B_r,), scalar
    """The factor that turns the sum into O, and lse in natural log; 0 and -inf for a row without keys."""
    l_safe = tl.where(l == 0.0, 1.0, l)
    # l tells an empty row (0) from one whose logits are all NaN, which a maximum does not see
    L = tl.where((m == float("-inf")) & (l == 0.0), float("-inf"), (m * c + tl.log2(l_safe)) * LN2)
    return 1.0 / l_safe, L


@triton.jit
def join_sink(m, l, c, sink):  # (B_r,), (B_r,), scalar, scalar logit
    """m, l and the rescale factor once a key of value 0 and logit `sink` has joined the sum."""
    m_new = tl.maximum(m, sink * LOG2E / c)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new * c)
    alpha = tl.exp2(m * c - shift)
    return m_new, l * alpha + tl.exp2(sink * LOG2E - shift), alpha


@triton.jit
def probabilities(S, L, c):  # (B_r, B_c), L broadcast to it, natural log
    """P = exp(S - L), from the lse that the forward kept."""
    return tl.exp2(S * c - tl.where(float("-inf") == L, 0.0, L * LOG2E))
