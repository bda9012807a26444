"""What a call writes: o, lse and gradients, allocated but unwritten; and the codes of its tensors."""

from typing import Any

import torch
from torch import Tensor

from ..call.backend import launch_module
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem, empty_parts, lse_shape, once

EMPTY_CUDA: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]
"""What PyTorch's compiled code allocates with, in half the time of torch.empty."""


def empty_saved(p: Problem, x: Operands, seed: Tensor | None) -> Saved:
    """Allocate the outputs of a forward, unwritten."""
    of_o, of_lse, *_ = sizes(p)
    return Saved(empty(of_o, x.q.device), empty(of_lse, x.q.device), seed)


def fill_empty(saved: Saved) -> Saved:
    """Return a forward's outputs where no row has a sequence."""
    saved.o.zero_()
    saved.lse.fill_(-torch.inf)
    return saved


@once
def sizes(p: Problem) -> list[Any]:
    """Return the sizes of o, lse, dq, dk and dv."""
    shapes = (*p.q.shape[:-1], p.D_v), p.q.shape, p.k.shape, p.v.shape
    of_o, *others = [size(p.out_dtype, *shape) for shape in shapes]
    return [of_o, size(torch.float32, *lse_shape(p.q.shape)), *others]


def size(dtype: torch.dtype, *shape: int) -> Any:
    """Return what `empty` takes for a contiguous tensor. (A torch.Size is no tuple for it.)"""
    return shape, torch.empty(shape, device="meta").stride(), dtype


def empty(size: Any, device: torch.device) -> Tensor:
    """Allocate a tensor, unwritten, on the CPU or the current GPU."""
    if EMPTY_CUDA is not None and device.type == "cuda":
        return EMPTY_CUDA(*size)
    shape, strides, dtype = size
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty_grads(p: Problem, x: Operands) -> Grads:
    """Allocate all gradients, unwritten."""
    q, k, v = empty_parts(p, x) if p.recipe.packed else [empty(size, x.q.device) for size in sizes(p)[2:]]
    return Grads(q, k, v, empty_extra(p, x))


def empty_extra(p: Problem, x: Operands) -> tuple[Tensor | None, ...]:
    """Allocate the gradients of the extras, as NaN; or as 0 if there are no rows to sum over."""
    if not p.wanted:
        return (None,) * len(x.extra)
    value = 0.0 if 0 in (p.B, p.M, p.N) else torch.nan
    return tuple(
        [
            torch.full(t.shape, value, dtype=t.dtype, device=t.device) if want else None
            for t, want in zip(x.extra, p.wanted, strict=True)
        ]
    )


def quantized(p: Problem, x: Operands, compiled: dict[Any, Any]) -> tuple[Tensor, ...]:
    """Return the tensors of a call's codes, or none where its products are of other numbers."""
    return launch_module("quantize").codes_of(p, x, compiled).present() if p.products.codes else ()
