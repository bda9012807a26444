"""Rotary position embedding with the interface of the flash_attn package, implemented by `tilewise.rotary`."""

from typing import Any

import torch
from torch import Tensor

from ....rotary.api import rotary, rotary_qk

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R dimensions of x (B, S, H, D), with cu_seqlens (T, H, D). cos and sin: (positions, R / 2).

    With `inplace`, write to x and return it. Then torch's rules for in-place writes to a tensor that needs a gradient
    apply. max_seqlen is ignored. The rest is as in `tilewise.rotary`.
    """
    if not inplace:
        return rotary(x, cos, sin, interleaved=interleaved, offsets=seqlen_offsets, cu_seqlens=cu_seqlens)
    part = x[..., : 2 * cos.shape[-1]]
    part.copy_(rotary(part, cos, sin, interleaved=interleaved, offsets=seqlen_offsets, cu_seqlens=cu_seqlens))
    return x


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Call `apply_rotary_emb`, whose order of arguments differs; with `conjugate`, rotate back."""
    sin = -sin if conjugate else sin
    return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of x (B, S, H, D) in plain torch. cos and sin: (S, R / 2) or (B, S, R / 2)."""
    R = 2 * cos.shape[-1]
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1) for t in (cos, sin))
    rotated = x[..., :R] * cos.unsqueeze(-2) + rotate_half(x[..., :R], interleaved) * sin.unsqueeze(-2)
    return torch.cat([rotated, x[..., R:]], -1)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every pair of x (…, R) by 90 degrees; pairs are (r, r + R / 2), or interleaved (2 r, 2 r + 1)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in place within qkv (B, S, 3, H, D), or (B, S, H_q + 2 H_k, D) with num_heads_q, and return it.

    cos and sin are for k, too, unless cos_k and sin_k are given. Raises ValueError for a shape that does not fit, and
    what `tilewise.rotary` raises.
    """
    q, k = (part[..., : 2 * cos.shape[-1]] for part in split_heads(qkv, num_heads_q)[:2])
    options: dict[str, Any] = {"interleaved": interleaved, "offsets": seqlen_offsets}
    if cos_k is None and sin_k is None:
        rotated = rotary_qk(q, k, cos, sin, **options)
    else:
        of_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        rotated = rotary(q, cos, sin, **options), rotary(k, *of_k, **options)
    q.copy_(rotated[0])
    k.copy_(rotated[1])
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate k in place within kv (B, S, 2, H_k, D), and return it."""
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"kv must have shape (B, S, 2, H_k, D), got {tuple(kv.shape)}; stack k and v in front of the heads"
        )
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, k and v in qkv (B, S, 3, H, D), or (B, S, H_q + 2 H_k, D) with num_heads_q."""
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        check_heads(num_heads_q, qkv.shape[3])
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]  # views of unbind and split may not be written to
    if qkv.ndim != 4:
        raise ValueError(
            f"qkv must have shape (B, S, 3, H, D), or (B, S, H_q + 2 H_k, D) with num_heads_q, got {tuple(qkv.shape)}; "
            "stack q, k and v in front of the heads"
        )
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q must leave an even number of the {heads} heads of qkv for k and v, got {num_heads_q}; "
            "pass the number of q's heads"
        )
    end = (heads + num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:end], qkv[:, :, end:]


def check_heads(num_heads_q: int | None, H: int) -> None:
    """Raise ValueError for another number than q has heads, where the shape tells it."""
    if num_heads_q not in (None, H):
        raise ValueError(f"num_heads_q must be None or q's number of heads, {H}, got {num_heads_q}; leave it out")


class RotaryEmbedding(torch.nn.Module):
    """Rotate the first `dim` dimensions of each head of q and k in place (RoFormer, Su et al. 2021).

    At position p, pair n is rotated by p * base ** (-2 n / dim). With `scale_base` (512 is usual) this is XPos (Sun et
    al. 2022): q is also scaled by zeta ** ((p - middle) / scale_base), and k by its inverse, where zeta_n is
    (2 n + 0.4 dim) / (1.4 dim). The tables are fp32 whatever the model's type, and grow for a longer sequence.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place, and return the tensors given.

        qkv and num_heads_q are as for `apply_rotary_emb_qkv_`; with kv (B, S, 2, H_k, D), qkv is q alone (B, S, H, D).
        seqlen_offset, an int or (B,), is added to positions. A tensor needs max_seqlen, the largest number of
        positions with offsets.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise ValueError(
                    "max_seqlen must be an int if seqlen_offset is a tensor, got None; pass 1 + the largest position"
                )
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin, cos_k, sin_k = self._tables_for(max_seqlen, qkv.device)
        if kv is None:
            own = (None, None) if self.scale_base is None else (cos_k, sin_k)
            return apply_rotary_emb_qkv_(qkv, cos, sin, *own, self.interleaved, seqlen_offset, num_heads_q)
        check_heads(num_heads_q, qkv.shape[2])
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _tables_for(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return cos and sin for q, then for k. They are rebuilt for another device or more positions."""
        tables = self._tables
        # a backward cannot save tensors made in inference mode
        stale = tables is not None and tables[0].is_inference() and not torch.is_inference_mode_enabled()
        if tables is None or stale or tables[0].shape[0] < positions or tables[0].device != device:
            # recompute frequencies, because converting a model to half precision rounds the buffer
            at = torch.arange(positions, device=device)
            angles, scale = torch.outer(at.float(), self._frequencies(device)), torch.ones((), device=device)
            if self.scale_base is not None:
                zeta = (torch.arange(0, self.dim, 2, device=device) + 0.4 * self.dim) / (1.4 * self.dim)
                scale = zeta ** ((at - positions // 2) / self.scale_base)[:, None]
            cos, sin = angles.cos(), angles.sin()
            tables = self._tables = cos * scale, sin * scale, cos / scale, sin / scale
        return tables
