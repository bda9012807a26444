"""Scores of the backward: those of parts/scores.py, but for what leaves it too few registers."""

import triton
import triton.language as tl

from ..parts.scores import alibi_fn, alibi_past_grad, softcap_fn, softcap_grad

__all__ = ["alibi_fn", "alibi_past_fn", "alibi_past_grad", "softcap_fn", "softcap_grad"]


@triton.jit
def alibi_past_fn(S, unit, at, slopes, batch, head):
    """S unit - slope (i - j), taken off S in two steps: what is added up before S is there lies in registers meanwhile,
    which the forward has, and is faster with."""
    slope = tl.load(slopes + at.b * batch + at.h * head).to(tl.float32)
    return S * unit - slope * (at.i0 - at.j0).to(tl.float32) - slope * (at.i - at.j).to(tl.float32)
