"""Select the backward's scores: those of parts/scores.py, except for one that leaves it too few registers."""

import triton
import triton.language as tl

from ..parts.scores import alibi_fn, alibi_past_grad, saturated, softcap_fn, softcap_grad

__all__ = ["alibi_fn", "alibi_past_fn", "alibi_past_grad", "saturated", "softcap_fn", "softcap_grad"]

STEPS = True
"""See `Form.steps` in host/statements.py; `alibi_past_fn` does it by hand."""


@triton.jit
def alibi_past_fn(S, unit, at, slopes, batch, head):
    """Return S unit - slope (i - j), subtracted from S in two steps. A sum made before S is there would lie in
    registers meanwhile; the forward has them, and is faster that way."""
    slope = tl.load(slopes + at.b * batch + at.h * head).to(tl.float32)
    return S * unit - slope * (at.i0 - at.j0).to(tl.float32) - slope * (at.i - at.j).to(tl.float32)
