"""FlashAttention-4's package flash_attn.cute, version 4.0, implemented by `tilewise.attention`.

Names, order and defaults are that package's. Tensors and arguments are otherwise those of `tilewise.compat.flash_attn`.
What is new, or differs:

    window_size         (left, right); None is open, and a side < 0 is refused, because it has another meaning there
    learnable_sink      (H,) logits added to the softmax's denominator: attention sinks; differentiable
    return_lse          also return lse; both functions return (out, lse), where lse is None without it
    seqused_q, _k       (B,): how many of each sequence's first rows count. In other rows out is 0, lse -inf, and
                        gradients are 0. A number above the sequence's length is cut to it
    page_table          (B, width): k and v are pages (pages, P, H_k, D), all of which count without seqused_k. There is
                        no backward

num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata and gather_bwd_*
are hints to that package's kernels, and ignored. Other arguments that are None by default raise Unsupported if they are
given: qv, gather_kv_indices, score_mod and mask_mod (functions in that package's own language), and block sparsity. Any
head size up to 256 works, on the CPU up to 512; v may have another than q and k.
"""

from typing import Any

import torch
from torch import Tensor

from ...attention.api import attention
from . import call
from .arguments import Length, Sides, number, options, refuse, sink_of
from .sequences import Sequences, attend_sequences

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Outputs = tuple[Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Outputs:
    """Compute attention of q (B, M, H, D) over k (B, N, H_k, D) and v (B, N, H_k, D_v); return (out, lse or None)."""
    refuse("flash_attn_func", qv=qv, gather_kv_indices=gather_kv_indices, aux_tensors=aux_tensors)
    refuse("flash_attn_func", score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    refuse("flash_attn_func", aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    refuse("flash_attn_func", block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    _refuse_negative(window_size)
    chosen = options(softmax_scale, causal, window_size, softcap, None, deterministic, sink_of(q, learnable_sink))
    o, lse = attention(q, k, v, **chosen._asdict(), return_lse=True)
    return o, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Length | None = None,
    max_seqlen_k: Length | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Any = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> Outputs:
    """Compute attention of packed sequences: q (T, H, D), k (T', H_k, D) and v (T', H_k, D_v).

    Where cu_seqlens_q is None, q is padded (B, M, H, D), and so are out and lse; where cu_seqlens_k is, k and v are, if
    they are not in pages. Returns (out, lse or None).
    """
    refuse("flash_attn_varlen_func", qv=qv, gather_kv_indices=gather_kv_indices, aux_tensors=aux_tensors)
    refuse("flash_attn_varlen_func", score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    refuse("flash_attn_varlen_func", aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    _refuse_negative(window_size)
    chosen = options(softmax_scale, causal, window_size, softcap, None, deterministic, sink_of(q, learnable_sink))
    lengths = number(max_seqlen_q), number(max_seqlen_k), seqused_q, seqused_k
    o, lse = attend_sequences(q, k, v, chosen, Sequences(cu_seqlens_q, cu_seqlens_k, *lengths, page_table))
    return o, lse if return_lse else None


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Outputs:
    """Merge results as FlashAttention-3's function; return (out, lse or None). Rows are merged one by one, so what says
    of which sequence they are is not read.
    """
    o, lse = call.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return o, lse if return_lse else None


def _refuse_negative(window_size: Sides) -> None:
    if any(side is not None and side < 0 for side in window_size):
        raise ValueError(
            f"window_size must be (left, right), ints >= 0 or None, got {window_size}; pass None for an open side"
        )
