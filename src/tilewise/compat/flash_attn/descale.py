"""FlashAttention-3's tensors in e4m3, with q_descale, k_descale and v_descale, as tilewise's `Quantized`."""

from typing import Any

import torch
from torch import Tensor

from ...values.layout import PADDED, Layout, Varlen
from ...values.products import Quantized
from ...values.value import Unsupported
from .cache import Angles, Cache

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


def with_descales(q: Tensor, k: Tensor, v: Tensor, descales: Descales) -> tuple[Any, Any, Any]:
    """Return e4m3 tensors as Quantized, without a descale with the factor 1; other tensors as they are.

    As in that package, descales of 16-bit tensors are not read.
    """
    if q.dtype != torch.float8_e4m3fn:
        return q, k, v
    return tuple(quantized(t, scale) for t, scale in zip((q, k, v), descales, strict=True))  # type: ignore[return-value]


def quantized(t: Tensor, descale: Tensor | None) -> Quantized:
    """Return a tensor with its descale, which is 1 if it is None."""
    return Quantized(t, torch.ones((), device=t.device) if descale is None else descale)


def of_a_cache(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: Cache, angles: Angles, descales: Descales
) -> tuple[Tensor, Tensor | None, Tensor | None, Cache]:
    """Return q in bf16, new keys and values in fp32, and a cache of Quantized; 16-bit tensors as they are.

    The cache is converted where it is read; then products are those of bf16.
    """
    if q.dtype != torch.float8_e4m3fn:
        return q, k, v, cache
    if angles.cos is not None:
        raise Unsupported(
            "flash_attn_with_kvcache: rotary_cos is not None, but q is in e4m3; rotate q and k before, and leave it out"
        )
    keys: Any = cache.k
    stored = quantized(keys, descales[1]), quantized(cache.v, descales[2])  # type: ignore[arg-type]
    sequences = cache.lengths if isinstance(cache.lengths, Tensor) else q if cache.cu_q is None else cache.cu_q[1:]
    B, H_k = sequences.shape[0], keys.shape[-2]
    q = quantized(q, descales[0]).in_fp32(_packed(cache.cu_q), 0, B, H_k).to(torch.bfloat16)
    of_new = _packed(cache.cu_new)
    new = [
        None if t is None else Quantized(t, of.scale).in_fp32(of_new, 1, B, H_k)
        for t, of in zip((k, v), stored, strict=True)
    ]
    return q, *new, cache._replace(k=stored[0], v=stored[1])  # type: ignore[return-value]


def _packed(cu: Tensor | None) -> Layout:
    return PADDED if cu is None else Varlen(cu, cu)
