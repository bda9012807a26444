"""Merge partial results over disjoint sets of keys."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..call.backend import launch_module
from ..call.problem import lse_shape


def merge(
    parts: Sequence[tuple[Tensor, Tensor]], *, into: tuple[Tensor, Tensor] | None = None, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys into one; differentiable in every o and lse.

    Args:
        parts: (o, lse) pairs as `attention(..., return_lse=True)` returns them, all of one shape. A row with
            lse = -inf adds nothing. Pass the sink to one part only.
        into: (o, lse) of earlier keys, to which the parts are added in place, without gradients. Its o may have
            another type, fp32 for sums of 16-bit parts; begin with zeros and lse = -inf.
        backend: "triton" requires the kernel that reads each part once, without gradients. By default a GPU runs it
            where none is asked for, and other calls compute in torch.

    Returns:
        o (in the parts' type) and lse, as if attention had seen all keys at once; or `into`. They are
        lse = log(sum(exp(lse_p))) and o = sum(exp(lse_p - lse) * o_p).

    Raises:
        TypeError, ValueError: there is no part, or the parts differ in shape, type or device; `backend` is another;
            a gradient is asked for with `into` or `backend`.
    """
    parts = [tuple(part) for part in parts]  # type: ignore[misc]
    wants = _check(parts, into, backend)
    if backend is None and not wants and _on_gpu(*parts[0]) and launch_module("merge"):
        backend = "triton"
    if into is None and backend is None:
        return _merged(parts)
    with torch.no_grad():
        every = parts if into is None else [into, *parts]
        o, lse = into or tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in parts[0])
        if backend is not None:
            from .launch import merge_into

            merge_into(o, lse, every)
        else:
            found, found_lse = _merged([(x.to(lse.dtype), x_lse) for x, x_lse in every])
            o.copy_(found)
            lse.copy_(found_lse)
    return o, lse


def _on_gpu(o: Tensor, lse: Tensor) -> bool:
    """Tell whether the kernel takes a part by default: on a GPU, not in fp64 or a compiled graph."""
    return o.is_cuda and lse.dtype != torch.float64 and not torch.compiler.is_compiling()


def _check(parts: Sequence[Any], into: Any, backend: str | None) -> bool:
    """Raise TypeError or ValueError for what `merge` cannot take. Return whether a gradient is asked for."""
    if backend not in (None, "triton"):
        raise ValueError(f"merge: backend must be None or 'triton', got {backend!r}; leave it out to compute in torch")
    if not parts:
        raise ValueError(
            "merge: parts must hold at least one (o, lse) pair, got none; call attention with return_lse=True"
        )
    for name, part in [*((f"part {n}", part) for n, part in enumerate(parts)), *([("into", into)] if into else [])]:
        if len(part) != 2 or not all(isinstance(t, Tensor) for t in part):
            raise TypeError(
                f"merge: {name} must be a pair of tensors (o, lse), got "
                f"({', '.join(type(t).__name__ for t in part)}); call attention with return_lse=True"
            )
        o, lse = part
        if o.ndim not in (3, 4) or tuple(lse.shape) != lse_shape(o.shape):
            raise ValueError(
                f"merge: {name} must have o (B, M, H, D) and lse (B, H, M), or packed (T, H, D) and (H, T), got "
                f"{tuple(o.shape)} and {tuple(lse.shape)}; pass both as attention returns them"
            )
        first = parts[0][0]
        if (o.shape, o.device) != (first.shape, first.device) or (part is not into and o.dtype != first.dtype):
            raise ValueError(
                f"merge: {name} must have part 0's shape, type and device, {tuple(first.shape)}, {first.dtype} "
                f"and {first.device}, got {tuple(o.shape)}, {o.dtype} and {o.device}; convert or reshape it"
            )
    wants = torch.is_grad_enabled() and any(t.requires_grad for part in (*parts, into or ()) for t in part)
    if wants and (into is not None or backend is not None):
        name = "into" if into is not None else "backend"
        raise ValueError(f"merge: {name} must be None where a gradient is asked for, got one; leave it out")
    if into is not None and any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in into):
        raise ValueError(
            f"merge: into must have last strides of 1, got strides {into[0].stride()} and "
            f"{into[1].stride()}; make it with torch.zeros and torch.full"
        )
    if backend is not None and parts[0][1].dtype == torch.float64:
        raise ValueError("merge: backend must be None for fp64, got 'triton'; leave it out to compute in torch")
    return wants


def _merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge in torch, differentiably."""
    lses = torch.stack([lse for _, lse in parts])  # (parts, B, H, M)
    empty = lses.isneginf().all(0)
    finite = lses.masked_fill(empty, 0.0)  # so the gradient of an empty row is 0, not NaN
    weights = finite.softmax(0).masked_fill(empty, 0.0).mT.unsqueeze(-1)  # (parts, B, M, H, 1)
    o = reduce(torch.add, (w * o.to(w.dtype) for w, (o, _) in zip(weights, parts, strict=True)))
    return o.to(parts[0][0].dtype), finite.logsumexp(0).masked_fill(empty, -torch.inf)
