"""FlashAttention-3's tensors in e4m3, with q_descale, k_descale and v_descale, as tilewise's `Quantized`."""

from typing import Any

import torch
from torch import Tensor

from ...values.layout import PADDED, Layout, Varlen
from ...values.products import Quantized

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_DESCALES = None, None, None


def in_e4m3(q: Tensor) -> bool:
    """Tell whether q, and so k and v, are in e4m3; descales of 16-bit tensors are not read, as in that package."""
    return q.dtype == torch.float8_e4m3fn


def quantized(tensors: tuple[Tensor, ...], descales: Descales) -> tuple[Any, ...]:
    """Return e4m3 tensors with their descales, which are 1 where they are None."""
    pairs = zip(tensors, descales, strict=True)
    return tuple([Quantized(t, torch.ones((), device=t.device) if scale is None else scale) for t, scale in pairs])


def cache_of(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, B: int, descales: Descales) -> tuple[Any, Any, Any]:
    """Return q in bf16, and Quantized keys and values of a cache; 16-bit tensors as they are.

    The cache is converted where it is read; then products are those of bf16.
    """
    if not in_e4m3(q):
        return q, k, v
    of_q, of_k, of_v = quantized((q, k, v), descales)
    return of_q.in_fp32(layout_of(cu_q), 0, B, k.shape[-2]).to(torch.bfloat16), of_k, of_v


def layout_of(cu: Tensor | None) -> Layout:
    """Return the layout of rows that may be packed."""
    return PADDED if cu is None else Varlen(cu, cu)
