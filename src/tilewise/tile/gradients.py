"""P and dS of one tile in the backward (Dao et al. 2022, algorithm 4): S computed again, P from the lse that was kept.

i and j are positions inside the tile that starts at (place.i0, j0). They broadcast together either way round, so S may be
transposed; L and D broadcast with i.
"""

import triton
import triton.language as tl

from .masks import visible
from .scores import back, through


@triton.jit
def logits(S, place, variant, i, j0, j):
    """The logits after all scores."""
    return through(variant.scores, S, place.b, place.h, place.i0 + i + place.shift, j0 + j, len(variant.scores))


@triton.jit
def seen(place, variant, i, j0, j):
    """Which entries the mask shows."""
    return visible(variant.mask, place.b, place.h, place.i0 + i + place.shift, j0 + j) & (j0 + j < place.N)


@triton.jit
def logits_gradient(P, dP, D, S, place, variant, i, j0, j, STOP: tl.constexpr):
    """dS of the logits that entered score STOP; dP after dropout, S = Q K^T."""
    rows = place.i0 + i + place.shift
    return back(variant.scores, P * (dP - D), S, place.b, place.h, rows, j0 + j, STOP)
