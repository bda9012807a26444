"""Compute P and dS of one tile of the backward (Dao et al. 2022, algorithm 4): S again, then P from the lse that was
kept.

i and j are positions inside the tile that starts at (place.i0, j0). They broadcast together in either order, so S may
be transposed; L and D broadcast with i.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .dropout import dropout_mask
from .masks import visible
from .scores import Entries, apply_scores, scores_backward
from .softmax import probabilities


class Factors(NamedTuple):
    """Hold what converts numbers: logits times `unit` are in the backward's unit, dS K times `scale` is dQ. `one` is 1,
    unknown to the compiler, so that a sum is one multiply-add."""

    unit: object
    scale: object
    one: object


@triton.jit
def seen(place, variant, i, j0, j):
    """Return which entries the mask shows."""
    return visible(variant.mask, place.b, place.h, place.i0 + i + place.shift, j0 + j) & (j0 + j < place.N)


@triton.jit
def scores_gradient(
    S, dP, L, D, place, variant, unit, i, j0, j, EXACT: tl.constexpr, MASKED: tl.constexpr, STOP: tl.constexpr
):
    """Return (P after dropout, the gradient of the logits before score STOP) from S = Q K^T and dP = dO V^T."""
    at = Entries(place.b, place.h, place.i0 + i + place.shift, 0, j0, j)
    T = apply_scores(variant.scores, S, at, len(variant.scores))
    shown = T
    if MASKED:
        shown = tl.where(seen(place, variant, i, j0, j), T, float("-inf"))
    P = probabilities(shown, L, unit, EXACT)
    P_kept = P
    if variant.dropout is not None:
        Z = dropout_mask(variant.dropout, place, place.i0, i, j0, j)
        P_kept, dP = P * Z, dP * Z
    return P_kept, scores_backward(variant.scores, P * (dP - D), S, T, at, STOP)
