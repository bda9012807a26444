"""Launch of the rotary kernel: its arguments and tile sizes."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from ..host.arguments import cdiv, odd, power_of_2
from .in_torch import Rotation
from .kernel import Heads, Places, Tables, rotary_embedding


def launch(xs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs in one launch. CPU tensors work in Triton's interpreter, for tests."""
    x, cu = xs[0], rotation.cu_seqlens
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if not any(y.numel() for y in ys):
        return ys
    (positions, P), D = rotation.cos.shape, x.shape[-1]
    places = Places(*(None if t is None else t.contiguous() for t in (rotation.offsets, cu)))
    heads = [
        Heads(x, y, odd(x.shape[-2]), x.stride(0) if cu is None else 0, *x.stride()[-3:])
        for x, y in zip(xs, ys, strict=True)
    ]
    tokens, sequences = x.shape[:-2].numel(), len(x) if cu is None else len(cu) - 1
    sizes = tokens, x.shape[-3], sequences, positions, rotation.offset, -1.0 if rotation.inverse else 1.0, P, D
    blocks = tiles(max(x.shape[-2] for x in xs), P, D)
    grid = cdiv(tokens, blocks["B_T"]), sum(cdiv(x.shape[-2], blocks["B_H"]) for x in xs)
    with torch.cuda.device_of(x) if x.is_cuda else nullcontext():
        rotary_embedding[grid](
            tuple(heads), Tables(*rotation.angles.tables()), places, *sizes, INTERLEAVED=rotation.interleaved, **blocks,
            enable_fp_fusion=False,  # so the bits are those of plain torch, and of 8-bit codes  # type: ignore[call-arg]
        )  # fmt: skip
    return ys


@cache
def tiles(H: int, P: int, D: int) -> dict[str, int]:
    """Return a tile's tokens, heads, pairs and unrotated dimensions: powers of two, some 4096 elements, 32 a thread."""
    heads = min(8, power_of_2(H))
    rest = power_of_2(D - 2 * P) if D > 2 * P else 0
    return {"B_T": max(1, 4096 // (heads * power_of_2(D))), "B_H": heads, "B_P": power_of_2(P), "B_REST": rest}
