"""Attention layers with the interface of flash_attn.modules.mha; parameters and their names are that module's.

A row that sees no key gives 0. fused_bias_fc is a hint, and ignored; ParallelMHA and generation are not here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....attention.api import attention
from ....values.intervals import Causal, Padding
from ....values.masks import Full, Mask
from ....values.tables import Dense
from ....values.value import Unsupported
from ..arguments import Sides, check_absent, together
from ..flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ..layers.rotary import RotaryEmbedding

__all__ = ["MHA", "CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]


class _Flash(nn.Module):
    """What both layers over the functions of `flash_attn` share."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: Sides = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def options(self, causal: bool | None) -> dict[str, Any]:
        """Return the options of a call; `causal` overrides the layer's unless it is None."""
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": self.alibi_slopes,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_Flash):
    """Attention of qkv, whose options are those of `flash_attn_func`. Dropout applies while training."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Return (B, N, H, D) from qkv (B, N, 3, H, D); with cu_seqlens, (T, H, D) from (T, 3, H, D)."""
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self.options(causal))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, _length(max_seqlen), **self.options(causal))


class FlashCrossAttention(_Flash):
    """Attention of q over kv, whose options are those of `flash_attn_func`. Dropout applies while training."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: Sides = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Return (B, M, H, D) from q and kv (B, N, 2, H_k, D); with cu_seqlens, packed ones."""
        together(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self.options(causal))
        longest = _length(max_seqlen), _length(max_seqlen_k)
        return flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens_k, *longest, **self.options(causal))  # type: ignore[arg-type]


class CrossAttention(nn.Module):
    """Attention of q over kv, with a mask of keys. Dropout applies while training."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return (B, M, H, D) from q and kv (B, N, 2, H_k, D). key_padding_mask: bool (B, N), true where a key counts.

        If causal, the last query is aligned with the last key that counts.
        """
        k, v = kv.unbind(2)
        causal, M, N = self.causal if causal is None else causal, q.shape[1], k.shape[1]
        mask: Mask = Causal() if causal else Full()
        if key_padding_mask is not None and causal and M != N:
            i, j = torch.arange(M, device=q.device)[:, None], torch.arange(N, device=q.device)
            last = i + key_padding_mask.sum(1)[:, None, None] - M  # (B, M, 1)
            mask = Dense((key_padding_mask[:, None] & (j <= last))[:, None])
        elif key_padding_mask is not None:
            mask = mask & Padding(key_padding_mask)
        dropout = self.drop.p if self.training else 0.0
        return attention(q, k, v, mask=mask, scale=self.softmax_scale, dropout=dropout)


class SelfAttention(CrossAttention):
    """Attention of qkv, with a mask of keys. Dropout applies while training."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return (B, N, H, D) from qkv (B, N, 3, H, D). key_padding_mask: bool (B, N), true where a key counts."""
        return super().forward(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)


class MHA(nn.Module):
    """Multi-head self-attention, or with cross_attn attention over x_kv, with its projections.

    num_heads_kv, by default num_heads, divides num_heads. dwconv convolves over three positions after the projection.
    rotary_emb_* are arguments of `RotaryEmbedding`, with dim 0 for none. use_alibi adds ALiBi with the usual slopes; it
    needs use_flash_attn, and so do windows and packed sequences. return_residual returns (output, x). checkpointing
    computes the attention again in the backward.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Sides = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv or num_heads
        if embed_dim % num_heads or num_heads % self.num_heads_kv:
            sizes = embed_dim, num_heads, self.num_heads_kv
            raise ValueError(
                f"embed_dim, num_heads and num_heads_kv must each divide the one before, got {sizes}; change one"
            )
        if not use_flash_attn and (use_alibi or tuple(window_size) != (-1, -1)):
            raise ValueError("use_flash_attn must be True with use_alibi or window_size, got False; set it")
        if cross_attn and rotary_emb_dim:
            raise ValueError(f"rotary_emb_dim must be 0 with cross_attn, got {rotary_emb_dim}; leave it out")
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx, self.dwconv = cross_attn, causal, layer_idx, dwconv
        self.rotary_emb_dim, self.use_flash_attn = rotary_emb_dim, use_flash_attn
        self.return_residual, self.checkpointing = return_residual, checkpointing
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if rotary_emb_dim:
            rotary = rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, *rotary, device=device)
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **made)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **made)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **made)
        if dwconv and self.num_heads_kv == num_heads:
            self.dwconv_qkv = _convolution(embed_dim + kv_dim)
        elif dwconv:
            self.dwconv_q, self.dwconv_kv = _convolution(embed_dim), _convolution(kv_dim)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            options |= {"alibi_slopes": slopes, "window_size": window_size}
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**options)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **made)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the layer's output, of x's shape; with return_residual, a pair of it and x.

        x and, for cross-attention, x_kv are (B, N, embed_dim), or packed (T, embed_dim) with cu_seqlens and max_seqlen;
        x_kv None is x. key_padding_mask, bool (B, N), is true where a key counts; it is for use_flash_attn=False.
        mixer_subset indexes the positions whose queries are wanted, for cross-attention. The inner layer gets kwargs.
        """
        if inference_params is not None:
            raise Unsupported("MHA: inference_params is not None, but nothing keeps keys; leave inference_params out")
        flash = self.use_flash_attn
        of_flash: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        of_other: dict[str, Any] = {"key_padding_mask": key_padding_mask}
        check_absent(f"with use_flash_attn={flash}", **(of_other if flash else of_flash))
        if not self.cross_attn:
            check_absent("without cross_attn", x_kv=x_kv, mixer_subset=mixer_subset)
        if self.dwconv or self.rotary_emb_dim:
            check_absent("with dwconv or rotary_emb_dim", cu_seqlens=cu_seqlens)
        kwargs = (of_flash if flash else of_other) | kwargs
        if self.cross_attn:
            queries = x if mixer_subset is None else x[:, mixer_subset]
            parts = self.Wq(queries), self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv, joint = self.Wqkv(x), self.num_heads_kv == self.num_heads
            parts = (qkv,) if joint else (qkv[..., : self.embed_dim], qkv[..., self.embed_dim :])
        out = self.out_proj(self._attend(*parts, **kwargs).flatten(-2))
        return (out, x) if self.return_residual else out

    def _attend(self, *parts: Tensor, **kwargs: Any) -> Tensor:
        """Return (…, H, D) from a joint projection, or from those of q and of k and v."""
        if self.dwconv:
            names = ("dwconv_qkv",) if len(parts) == 1 else ("dwconv_q", "dwconv_kv")
            N = parts[0].shape[1]
            pairs = zip(names, parts, strict=True)
            parts = tuple(getattr(self, name)(x.transpose(1, 2))[..., :N].transpose(1, 2) for name, x in pairs)
        shapes = ((3, -1, self.head_dim),) if len(parts) == 1 else ((-1, self.head_dim), (2, -1, self.head_dim))
        parts = tuple(x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))
        if self.rotary_emb_dim:
            rotated = self.rotary_emb(*parts)
            parts = (rotated,) if isinstance(rotated, Tensor) else rotated
        run = self.inner_attn if len(parts) == 1 else self.inner_cross_attn
        return checkpoint(run, *parts, use_reentrant=False, **kwargs) if self.checkpointing else run(*parts, **kwargs)


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return ALiBi's slopes (Press et al. 2022): powers of 2^(-8 / n), and between them where nheads is no such n."""
    n = 2 ** (nheads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return slopes + [2 ** (-4 * (2 * i + 1) / n) for i in range(nheads - n)]


def _convolution(size: int) -> nn.Conv1d:
    return nn.Conv1d(size, size, kernel_size=3, padding=2, groups=size)


def _length(max_seqlen: int | None) -> int:
    if max_seqlen is None:
        raise ValueError("max_seqlen must be an int with cu_seqlens, got None; pass the longest sequence's length")
    return max_seqlen
