"""Launch of the rotary kernel: its arguments and tile sizes."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..host.arguments import odd, power_of_2
from .kernel import Heads, Places, Tables, rotary_embedding


def launch(xs: Sequence[Tensor], ys: Sequence[Tensor], rotation: Any) -> None:
    """Rotate every x by `rotation`, a rotary.Rotation, into its contiguous y. At least one must have elements."""
    x = xs[0]
    packed = rotation.cu_seqlens is not None
    cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (rotation.cos, rotation.sin))
    places = Places(*(None if t is None else t.contiguous() for t in (rotation.offsets, rotation.cu_seqlens)))
    tokens, P, D = x.shape[:-2].numel(), cos.shape[1], x.shape[-1]
    B_T, B_H, B_P, B_REST = tiles(max(x.shape[-2] for x in xs), P, D)
    heads = [
        Heads(x, y, odd(x.shape[-2]), 0 if packed else x.stride(0), *x.stride()[-3:])
        for x, y in zip(xs, ys, strict=True)
    ]
    grid = triton.cdiv(tokens, B_T), sum(triton.cdiv(x.shape[-2], B_H) for x in xs)
    with torch.cuda.device_of(x) if x.is_cuda else nullcontext():
        rotary_embedding[grid](
            tuple(heads),
            Tables(cos, sin, cos.stride(0), sin.stride(0)),
            places,
            tokens,
            x.shape[-3],
            rotation.cu_seqlens.shape[0] - 1 if packed else x.shape[0],
            cos.shape[0],
            rotation.offset,
            -1.0 if rotation.inverse else 1.0,
            P,
            D,
            INTERLEAVED=rotation.interleaved,
            B_T=B_T,
            B_H=B_H,
            B_P=B_P,
            B_REST=B_REST,
            enable_fp_fusion=False,  # so the bits are those of plain torch, and of 8-bit codes  # type: ignore[call-arg]
        )


@cache
def tiles(H: int, P: int, D: int) -> tuple[int, int, int, int]:
    """Return a tile's tokens, heads, pairs and unrotated dimensions: powers of two, some 4096 elements, 32 a thread."""
    B_H = min(8, power_of_2(H))
    B_T = max(1, 4096 // (B_H * power_of_2(D)))
    return B_T, B_H, power_of_2(P), power_of_2(D - 2 * P) if D > 2 * P else 0
