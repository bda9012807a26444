"""Kernels that apply emitted device functions to tiles, of which the last ones stick out."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.host.emit import Form, arguments, functions
from tilewise.program import Traced
from tilewise.tile.masks import Part as MaskPart
from tilewise.tile.masks import everywhere, visible
from tilewise.tile.scores import Entries, apply_scores, scores_backward
from tilewise.tile.scores import Part as ScorePart

TILE = 8


@triton.jit
def mask_kernel(out, mask, H, M, N, B_R: tl.constexpr, B_C: tl.constexpr):
    """Write what a mask shows."""
    matrix = tl.program_id(2)
    i = tl.program_id(0) * B_R + tl.arange(0, B_R)[:, None]
    j = tl.program_id(1) * B_C + tl.arange(0, B_C)[None, :]
    seen = visible(mask, matrix // H, matrix % H, i + (N - M), j)
    tl.store(out + (matrix * M + i) * N + j, tl.where(seen, 1, 0), mask=(i < M) & (j < N))


@triton.jit
def score_kernel(S, dS, T, dS_in, scores, H, M, N, B_R: tl.constexpr, B_C: tl.constexpr):
    """Write the logits after scores, and the gradient of those before. Either splits rows in its own way."""
    matrix = tl.program_id(2)
    i0, i = tl.program_id(0) * B_R, tl.arange(0, B_R)[:, None]
    j0, j = tl.program_id(1) * B_C, tl.arange(0, B_C)[None, :]
    at = (matrix * M + i0 + i) * N + j0 + j
    real = (i0 + i < M) & (j0 + j < N)
    s, g = tl.load(S + at, mask=real, other=0.0), tl.load(dS + at, mask=real, other=0.0)
    b, h = matrix // H, matrix % H
    t = apply_scores(scores, s, Entries(b, h, i0 + i + (N - M), 0, j0 + j, 0), len(scores))
    tl.store(T + at, t, mask=real)
    back = Entries(b, h, i0 + (N - M), i, j0, j)
    tl.store(dS_in + at, scores_backward(scores, g, s, t, back, 0), mask=real)


def grid(B: int, H: int, M: int, N: int, tile: tuple[int, int] = (TILE, TILE)) -> tuple[int, int, int]:
    return triton.cdiv(M, tile[0]), triton.cdiv(N, tile[1]), B * H


def mask_part(traced: Traced, form: Form, place: tuple[Any, ...] = ()) -> MaskPart:
    text = traced.program.text
    keep = functions(text, form)["keep"]
    return MaskPart(keep, everywhere, everywhere, arguments(text, traced.tensors, traced.numbers, place))


def score_part(
    traced: Traced, form: Form, place: tuple[Any, ...] = (), unit: float = 1.0, saturated: Any = None
) -> ScorePart:
    text = traced.program.text
    made = functions(text, form, saturated)
    return ScorePart(made["fn"], made["grad"], unit, arguments(text, traced.tensors, traced.numbers, place))


def seen(part: MaskPart, B: int, H: int, M: int, N: int) -> Tensor:
    """What a mask shows, (B, H, M, N)."""
    out = torch.zeros(B, H, M, N, dtype=torch.int8)
    mask_kernel[grid(B, H, M, N)](out, (part,), H, M, N, TILE, TILE)
    return out.bool()


def scored(part: ScorePart, S: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The logits after a score, and the gradient of those before."""
    B, H, M, N = S.shape
    T, dS_in = torch.empty_like(S), torch.empty_like(S)
    score_kernel[grid(B, H, M, N)](S, dS, T, dS_in, (part,), H, M, N, TILE, TILE)
    return T, dS_in
