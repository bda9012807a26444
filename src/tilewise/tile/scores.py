"""Compute scores on the device, as score.py describes them. Each score is a pair.

    fn(S, unit, at, *captured)           returns the logits after the score; S unit are those before
    grad(dS, S, T, unit, at, *captured)  returns the gradient with respect to S unit

T are the logits after the score, or any number where dS is 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import Packed, row_values, rows_of


class Entries(NamedTuple):
    """Locate the entries of a tile of S: batch entry b, head h, rows i0 + i (shifted by N - M), columns j0 + j. They
    broadcast. i and j are the same for every tile: constants, at best."""

    b: object
    h: object
    i0: object
    i: object
    j0: object
    j: object


class Part(NamedTuple):
    """Hold one score: its device pair and what it captured."""

    fn: tl.constexpr
    grad: tl.constexpr
    unit: object
    """Is the softmax scale for the first score, which S enters as it is; 1 for those after it."""
    captured: tuple


@triton.jit
def apply_score(score, S, at):
    """Return the logits after one score."""
    return score.fn(S, score.unit, at, *score.captured)


@triton.jit
def score_backward(score, dS, S, T, at):
    """Return the gradient of the logits before one score."""
    return score.grad(dS, S, T, score.unit, at, *score.captured)


@triton.jit
def apply_scores(scores, S, at, COUNT: tl.constexpr):
    """Return the logits after the first COUNT scores."""
    for p in tl.static_range(COUNT):
        S = apply_score(scores[p], S, at)
    return S


@triton.jit
def scores_backward(scores, dS, S, T, at, STOP: tl.constexpr):
    """Return the gradient of the logits before score STOP, from that of T, the logits after the last; S enters the
    first."""
    for n in tl.static_range(len(scores) - STOP):
        S_in = apply_scores(scores, S, at, len(scores) - 1 - n)
        dS = score_backward(scores[len(scores) - 1 - n], dS, S_in, T, at)
        T = S_in
    return dS


@triton.jit
def finite(lse):
    """Return lse as a number that logits of -inf may be shifted by: that of a row without keys is -inf."""
    return tl.maximum(lse, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minus_lse_fn(S, unit, at, lse, H, M, N, cu_q=None, cu_k=None, max_q=None, max_k=None):
    """Return S unit - lse: the backward's last score with a bias (see tile/renormalize.py). Counts are 2 n + 1; those
    of packed sequences are in all, and what `Packed` holds follows."""
    packed = None if cu_q is None else Packed(cu_q, cu_k, max_q, max_k)
    q0, m, _, n = rows_of(packed, at.b, M >> 1, N >> 1)
    row = tl.minimum(at.i0 + at.i - (n - m), m - 1)
    return S * unit - finite(tl.load(row_values(lse, packed, at.b, at.h, H >> 1, q0, M >> 1) + row))


@triton.jit
def minus_lse_grad(dS, S, T, unit, at, lse, H, M, N, cu_q=None, cu_k=None, max_q=None, max_k=None):
    """Return dS: the softmax does not depend on a shift of whole rows."""
    return dS
