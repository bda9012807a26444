"""FlashAttention-4's package flash_attn.cute, version 4.0, implemented by `tilewise.attention`.

Names, order and defaults are that package's. Tensors and arguments are otherwise those of `tilewise.compat.flash_attn`.
What is new, or differs:

    window_size         (left, right); None is open, and a side < 0 is refused, because it has another meaning there
    learnable_sink      (H,) logits added to the softmax's denominator: attention sinks; differentiable
    return_lse          also return lse; both functions return (out, lse), where lse is None without it

num_splits, pack_gqa, min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata and gather_bwd_*
are hints to that package's kernels, and ignored. Other arguments that are None by default raise Unsupported if they are
given: qv, gather_kv_indices, score_mod and mask_mod (functions in that package's own language), block sparsity, pages
and lengths in use. Any head size up to 256 works, on the CPU up to 512; v may have another than q and k.
"""

from typing import Any

from torch import Tensor

from ...api import attention
from ...layout import Cached, Layout, Varlen
from .cache import cached_parts
from .call import Length, Options, Sides, equal_starts, number, options, refuse

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

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
    chosen = _options(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    return _attend(q, k, v, chosen, None, return_lse)


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

    Where cu_seqlens_q is None, q is padded (B, M, H, D), and so are out and lse; where cu_seqlens_k is, k and v are.
    Returns (out, lse or None).
    """
    refuse("flash_attn_varlen_func", qv=qv, gather_kv_indices=gather_kv_indices, aux_tensors=aux_tensors)
    refuse("flash_attn_varlen_func", score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod)
    refuse("flash_attn_varlen_func", aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors)
    refuse("flash_attn_varlen_func", seqused_q=seqused_q)
    chosen = _options(softmax_scale, causal, window_size, softcap, deterministic, learnable_sink)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _attend(q, k, v, chosen, None, return_lse)
    if seqused_k is not None or page_table is not None:
        where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, page_table
        return _attend_parts(q, k, v, where, chosen, return_lse)
    batch, max_q, max_k = None, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is None:
        batch, cu_seqlens_q, max_q, q = q.shape[:2], equal_starts(q), q.shape[1], q.flatten(0, 1)
    if cu_seqlens_k is None:
        cu_seqlens_k, max_k, k, v = equal_starts(k), k.shape[1], k.flatten(0, 1), v.flatten(0, 1)
    layout = Varlen(cu_seqlens_q, cu_seqlens_k, _maybe(max_q), _maybe(max_k))  # type: ignore[arg-type]
    o, lse = _attend(q, k, v, chosen, layout, return_lse)
    if batch is None:
        return o, lse
    return o.unflatten(0, batch), None if lse is None else lse.unflatten(1, batch).transpose(0, 1).contiguous()


def _attend_parts(q: Tensor, k: Tensor, v: Tensor, where: Any, chosen: Options, return_lse: bool) -> Outputs:
    """Attend to the rows in use of sequences, padded, packed or in pages."""
    cu_q, cu_k, max_q, used, table = where
    max_q = _maybe(max_q) if cu_q is not None else None
    if cu_k is not None and table is None:
        packed = cu_q is not None
        starts, rows = (cu_q, q) if packed else (equal_starts(q), q.flatten(0, 1))
        k, v, layout = cached_parts(k, v, starts, cu_k, max_q or q.shape[-3], used)
        o, lse = _attend(rows, k, v, chosen, layout, return_lse)
        if packed:
            return o, lse
        return o.unflatten(0, q.shape[:2]), None if lse is None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    lengths: Any = cu_k.diff() if used is None else used
    return _attend(q, k, v, chosen, Cached(lengths, table, cu_q=cu_q, max_q=max_q), return_lse)


def _maybe(length: Length | None) -> int | None:
    return None if length is None else number(length)


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    softcap: float,
    deterministic: bool,
    sink: Tensor | None,
) -> Options:
    if any(side is not None and side < 0 for side in window_size):
        raise ValueError(
            f"window_size must be (left, right), ints >= 0 or None, got {window_size}; pass None for an open side"
        )
    return options(softmax_scale, causal, window_size, softcap, None, deterministic, sink)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Options, layout: Layout | None, return_lse: bool) -> Outputs:
    if not return_lse:
        return attention(q, k, v, **chosen._asdict(), layout=layout), None
    return attention(q, k, v, **chosen._asdict(), layout=layout, return_lse=True)
