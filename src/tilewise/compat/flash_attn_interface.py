"""FlashAttention-3's module flash_attn_interface, version 3.0, implemented by `tilewise.attention`.

Names, order and defaults are that module's: the fourth argument is softmax_scale, and there is neither dropout nor
ALiBi. Tensors and arguments are otherwise those of `tilewise.compat.flash_attn`. What is new, or differs:

    attention_chunk     row i sees keys of its own chunk alone: j // chunk = (i + N - M) // chunk; 0 is off. Unlike
                        that package's, it has gradients
    s_aux               (H,) logits added to the softmax's denominator: attention sinks; differentiable
    return_attn_probs   return (out, softmax_lse) instead of out
    seqused_q, _k       (B,): how many of each sequence's first rows count. In other rows out is 0, softmax_lse -inf,
                        and gradients are 0. A number above the sequence's length is cut to it

    q, k, v in e4m3     are `tilewise.Quantized` with q_descale, k_descale and v_descale, (B, H_k), and multiplied with
                        precision="fp8"; out is bf16. They have no gradients. Caches in e4m3, and keys with
                        seqused_k, are converted where they are read, and q to bf16 before

num_splits, pack_gqa, sm_margin and scheduler_metadata are hints to that package's kernels, and ignored. qv raises
Unsupported, and so do pages, lengths in use and a cache in _flash_attn_forward.
Any head size up to 256 works, on the CPU up to 512; v may have another than q and k.
"""

import torch
from torch import Tensor

from ..attention.api import attention_qkvpacked
from ..values.layout import Varlen
from .flash_attn.arguments import Length, Sides, in_e4m3, number, options, refuse, sink_of, together
from .flash_attn.cache import Angles, Cache, attend_cache
from .flash_attn.call import Result, flash_attn_combine
from .flash_attn.flash_attn_gpu import bwd, varlen_bwd
from .flash_attn.layers.rotary import check_heads, split_heads
from .flash_attn.sequences import Sequences, attend_sequences

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sides = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute attention of q (B, M, H, D) over k (B, N, H_k, D) and v (B, N, H_k, D_v)."""
    refuse("flash_attn_func", qv=qv)
    chosen = options(softmax_scale, causal, window_size, softcap, None, deterministic, sink_of(q, s_aux))
    at = Sequences(chunk=attention_chunk, descales=(q_descale, k_descale, v_descale))
    o, lse = attend_sequences(q, k, v, chosen, at)
    return (o, lse) if return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sides = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute attention of packed sequences: q (T, H, D), k (T', H_k, D) and v (T', H_k, D_v)."""
    refuse("flash_attn_varlen_func", qv=qv)
    chosen = options(softmax_scale, causal, window_size, softcap, None, deterministic, sink_of(q, s_aux))
    sequences = cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), number(max_seqlen_k), seqused_q, seqused_k
    at = Sequences(*sequences, chunk=attention_chunk, descales=(q_descale, k_descale, v_descale))
    o, lse = attend_sequences(q, k, v, chosen, at)
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sides = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """Call flash_attn_func with q, k and v from qkv (B, N, 3, H, D), or (B, N, H + 2 H_k, D) with num_heads_q."""
    chosen = options(softmax_scale, causal, window_size, softcap, None, deterministic)
    if qkv.ndim == 5 and attention_chunk == 0 and not in_e4m3(qkv):
        check_heads(num_heads_q, qkv.shape[-2])
        o, lse = attention_qkvpacked(qkv, **chosen._asdict(), return_lse=True)
    else:
        at = Sequences(chunk=attention_chunk, descales=(q_descale, k_descale, v_descale))
        o, lse = attend_sequences(*split_heads(qkv, num_heads_q), chosen, at)
    return (o, lse) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Append k and v to a cache, in place, and compute attention of q to all its keys, as FlashAttention-2's function.

    With cu_seqlens_q, q is packed (T, H, D); with cu_seqlens_k_new, so are k and v. rotary_seqlens (B,) replace
    cache_seqlens as positions. What schedules its kernels is not read.
    """
    refuse("flash_attn_with_kvcache", qv=qv, attention_chunk=attention_chunk or None)
    where = cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q
    cache = Cache(k_cache, v_cache, cache_seqlens, *where, (q_descale, k_descale, v_descale))
    angles = Angles(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    o, lse = attend_cache(q, k, v, cache, angles, options(softmax_scale, causal, window_size, softcap))
    return (o, lse) if return_softmax_lse else o


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return a tensor for scheduler_metadata, which is a hint and not read: int32 (1,), 0."""
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and softmax_lse, padded or packed, and two empty tensors. It is not differentiable."""
    refuse("_flash_attn_forward", k_new=k_new, v_new=v_new, qv=qv, page_table=page_table, leftpad_k=leftpad_k)
    refuse("_flash_attn_forward", seqused_q=seqused_q, seqused_k=seqused_k, kv_batch_idx=kv_batch_idx)
    refuse("_flash_attn_forward", rotary_cos=rotary_cos, rotary_sin=rotary_sin, seqlens_rotary=seqlens_rotary)
    refuse("_flash_attn_forward", cu_seqlens_k_new=cu_seqlens_k_new)
    together(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    chosen = options(softmax_scale, causal, (window_size_left, window_size_right), softcap)
    sequences, descales = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (q_descale, k_descale, v_descale)
    at = Sequences(*sequences, chunk=attention_chunk, descales=descales)
    o, lse = attend_sequences(q, k, v, chosen, at)
    return o if out_ is None else out_.copy_(o), lse, lse.new_empty(0), lse.new_empty(0)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Write dq, dk and dv, and return softmax_d, rowsum(dout * out), in softmax_lse's shape."""
    refuse("_flash_attn_backward", sequed_q=sequed_q, sequed_k=sequed_k)
    together(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv
    rest = is_causal, window_size_left, window_size_right, softcap, deterministic
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return bwd(*tensors, None, 0.0, softmax_scale, *rest)[3]
    longest = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k).longest()
    return varlen_bwd(*tensors, cu_seqlens_q, cu_seqlens_k, None, *longest, 0.0, softmax_scale, False, *rest)[3]
