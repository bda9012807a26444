"""Validation and conversion of q, k and v that are in 8 bits already (`Quantized`), and of `EightBits`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..values.layout import Cached, Layout, Varlen
from ..values.products import EightBits, Quantized
from ..values.rotation import check_tables
from ..values.value import Unsupported
from .check_cache import check_scale, unquantized
from .operands import Operands
from .problem import Problem


def without_scales(
    q: Any, k: Any, v: Any, layout: Layout | None, precision: str | EightBits | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return q, k and v as tensors; the scales of all three, or of a cache's k and v, or () for none.

    Three Quantized become bf16. With precision "fp8" they stay as they are, with scales (B, H_k). Raise TypeError or
    ValueError if they do not fit each other, Unsupported if a gradient is wanted.
    """
    if not isinstance(q, Quantized):
        return q, *unquantized(k, v, layout)[:2], (), (k.scale, v.scale)
    named = {"q": q, "k": k, "v": v}
    if isinstance(layout, Cached):
        raise ValueError("layout must be None or a Varlen where q is a Quantized, got a Cached; convert q to bf16")
    for name, t in named.items():
        if not isinstance(t, Quantized):
            raise TypeError(f"{name} must be a Quantized where q is, got {type(t).__name__}; give it a scale, too")
    if precision not in (None, "fp8"):
        raise ValueError(
            f"precision must be None or fp8 where q is a Quantized, got {precision!r}; leave it out for bf16 products"
        )
    refuse_gradients_of_e4m3((q.scale,), [t for one in named.values() for t in (one.x, one.scale)])
    rank, shape = (3, "(T, heads, head size)") if isinstance(layout, Varlen) else (4, "(B, length, heads, head size)")
    for name, t in named.items():
        if t.x.ndim != rank:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(t.x.shape)}; reshape it, or set layout")
    B = layout.cu_q.shape[0] - 1 if isinstance(layout, Varlen) else q.x.shape[0]
    H_k = k.x.shape[-2]
    for name, t in named.items():
        if tuple(t.scale.shape) not in ((), (H_k,), (B, H_k)):
            raise ValueError(
                f"{name}'s scale must have shape (), ({H_k},) or ({B}, {H_k}), one number for each key head, got "
                f"{tuple(t.scale.shape)}; reshape it"
            )
    if precision is None:
        ends = (layout.cu_q, layout.cu_k, layout.cu_k) if isinstance(layout, Varlen) else (None, None, None)
        q, k, v = (in_bf16(t, B, H_k, cu) for t, cu in zip((q, k, v), ends, strict=True))
        return q, k, v, (), ()
    return q.x, k.x, v.x, tuple([t.scale.expand(B, H_k).contiguous() for t in (q, k, v)]), ()


def refuse_gradients_of_e4m3(scales: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Raise Unsupported if there are scales of q, k and v, and a gradient is wanted."""
    if scales and torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
        raise Unsupported(
            "Quantized q, k and v are for inference, and an operand has requires_grad=True; run it under "
            "torch.no_grad(), or pass 16-bit tensors with precision='fp8'"
        )


def in_bf16(t: Quantized, B: int, H_k: int, cu: Tensor | None = None) -> Tensor:
    """Return x * scale. Query heads have their key head's scale."""
    scale = of_rows(t.scale.expand(B, H_k), t.x.shape[-2], t.x.shape[0], cu)
    return (t.x.float() * scale).to(torch.bfloat16)


def of_rows(scale: Tensor, heads: int, rows: int, cu: Tensor | None) -> Tensor:
    """Return scales (B, H_k) as they broadcast to the rows of a tensor: (B, 1, heads, 1), packed (rows, heads, 1)."""
    each = scale.repeat_interleave(max(1, heads // max(1, scale.shape[1])), 1)[..., None]
    if cu is None:
        return each[:, None]
    if len(scale) == 0:  # all rows are of no sequence
        return each.new_zeros(rows, *each.shape[1:])
    at = torch.arange(rows, device=scale.device)
    return each[(torch.searchsorted(cu, at, right=True) - 1).clamp(0, scale.shape[0] - 1)]


def given_beforehand(
    precision: EightBits, q: Tensor, layout: Layout | None
) -> tuple[str, tuple[Tensor, ...], tuple[Tensor, ...], str | None]:
    """Return the precision's name, mean and balance, (B, H_k, D), cos and sin, and how pairs lie."""
    told, tables = (), ()
    if precision.mean is not None and precision.balance is not None:
        batch = q if layout is None else layout.cu_q[1:] if isinstance(layout, Varlen) else layout.lengths
        pair = precision.mean, precision.balance
        told = tuple([(t if t.ndim == 3 else t.expand(len(batch), *t.shape)).contiguous() for t in pair])
    if precision.cos is not None and precision.sin is not None:
        tables = precision.cos, precision.sin
        check_tables(q, *tables)
    return precision.name, told, tables, ("neighbours" if precision.interleaved else "halves") if tables else None


def check_scales(p: Problem, x: Operands) -> None:
    """Raise ValueError for a scale that is not positive and finite, or a balance that is no power of two."""
    if p.recipe.given:
        balance = x.extra[p.after_sink + 1]
        if not bool(((torch.frexp(balance).mantissa == 0.5) & balance.isfinite()).all()):
            raise ValueError("EightBits: balance must hold powers of two, got others; use torch.exp2 of integers")
        return
    for name, scale in zip(("q", "k", "v"), x.extra[p.after_sink : p.after_sink + 3], strict=True):
        check_scale(name, scale)
