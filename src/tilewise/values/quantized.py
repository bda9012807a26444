"""Operands in 8 bits (Quantized), and how calls take them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .products import EXACT, EightBits, Products, Scaled, products_of
from .value import Frozen, Unsupported


@dataclass(frozen=True, eq=False)
class Quantized(Frozen):
    """A tensor x in e4m3 (torch.float8_e4m3fn) and its scale: it stands for x * scale.

    In the place of k and v it goes with `layout=Cached(...)`. Keys and values are converted where they are read;
    products are those of q's type.

    In the place of q, k and v, all three, it goes with a padded batch or a Varlen. o is bf16, and there are no
    gradients. A pass in front converts the three to bf16; with `precision="fp8"`, x is multiplied as it is.

    scale: fp32, one number (), one a head (H_k,), or one a sequence and head (B, H_k), so also q's; all > 0. Raises
    TypeError or ValueError for anything else.
    """

    x: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        for name, dtype in (("x", torch.float8_e4m3fn), ("scale", torch.float32)):
            t = getattr(self, name)
            if not isinstance(t, Tensor) or t.dtype != dtype:
                got = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"Quantized: {name} must be a tensor of {dtype}, got {got}; convert it with .to(...)")
        if self.scale.ndim > 2:
            raise ValueError(
                f"Quantized: scale must have shape (), (H_k,) or (B, H_k), got {tuple(self.scale.shape)}; reshape it"
            )

    def to(self, device: torch.device | str | int) -> "Quantized":
        """Return the same value on a device."""
        return Quantized(self.x.to(device), self.scale.to(device))

    def in_fp32(self, layout: Layout, side: int, B: int, H_k: int) -> Tensor:
        """Return x * scale. Query heads have their key head's scale. `side` is 0 for queries, 1 for keys."""
        each = self.scale.expand(B, H_k).repeat_interleave(max(1, self.x.shape[-2] // max(1, H_k)), 1)[..., None]
        return self.x.float() * layout.of_rows(each, side, self.x.shape[0])


def refuse_backward(q: Any) -> None:
    """Raise Unsupported if q is in 8 bits."""
    if isinstance(q, Quantized):
        raise Unsupported("Quantized q, k and v are for inference and have no backward; pass 16-bit tensors")


def without_scale(t: Any) -> Tensor:
    """Return the tensor of a Quantized, and anything else as it is."""
    return t.x if isinstance(t, Quantized) else t


def describe_conversion(q: Any, converted: tuple[Tensor, ...]) -> list[str]:
    """Say that q, k and v of e4m3 were converted, where they were."""
    if not isinstance(q, Quantized) or converted[0].dtype == q.x.dtype:
        return []
    return [f"q, k and v are converted to bf16 first, {sum(t.numel() * t.itemsize for t in converted)} bytes"]


def unwrap(
    q: Any, k: Any, v: Any, layout: Layout, precision: str | EightBits | None
) -> tuple[Tensor, Tensor, Tensor, Layout, Products]:
    """Return q, k and v as tensors, and layout and products, of which one gets the scales of those in 8 bits.

    Three Quantized become bf16; with precision "fp8" they stay as they are. Raise TypeError or ValueError if they do
    not fit each other, Unsupported if a gradient is wanted.
    """
    if not isinstance(q, Quantized):
        return q, *unwrap_cache(k, v, layout), products_of(precision)
    named = {"q": q, "k": k, "v": v}
    if layout.needs & {"cache"}:
        raise ValueError("layout must be None or a Varlen where q is a Quantized, got a Cached; convert q to bf16")
    _check_all("q is", k=k, v=v)
    if precision not in (None, "fp8"):
        raise ValueError(
            f"precision must be None or fp8 where q is a Quantized, got {precision!r}; leave it out for bf16 products"
        )
    layout.check_ranks({name: t.x.shape for name, t in named.items()})
    B, H_k = layout.count(q.x.shape), k.x.shape[-2]
    for name, t in named.items():
        if tuple(t.scale.shape) not in ((), (H_k,), (B, H_k)):
            raise ValueError(
                f"{name}'s scale must have shape (), ({H_k},) or ({B}, {H_k}), one number for each key head, got "
                f"{tuple(t.scale.shape)}; reshape it"
            )
    scaled = Scaled(*(t.scale.expand(B, H_k).contiguous() for t in named.values()))
    scaled.refuse_gradients(*(t for one in named.values() for t in (one.x, one.scale)))
    if precision is None:
        wide = (t.in_fp32(layout, side, B, H_k).to(torch.bfloat16) for t, side in ((q, 0), (k, 1), (v, 1)))
        return *wide, layout, EXACT  # type: ignore[return-value]
    return q.x, k.x, v.x, layout, scaled


def unwrap_cache(k: Any, v: Any, layout: Any) -> tuple[Tensor, Tensor, Any]:
    """Return keys and values of a cache, and its layout with their scales, if they are in 8 bits."""
    if not (isinstance(k, Quantized) or isinstance(v, Quantized)):
        return k, v, layout
    _check_all("the other is", k=k, v=v)
    return k.x, v.x, layout.with_scales(k.scale, v.scale)


def _check_all(where: str, **named: Any) -> None:
    for name, t in named.items():
        if not isinstance(t, Quantized):
            raise TypeError(f"{name} must be a Quantized where {where}, got {type(t).__name__}; give it a scale, too")
