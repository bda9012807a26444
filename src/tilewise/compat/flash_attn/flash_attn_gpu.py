"""The functions of flash_attn's extension, flash_attn_2_cuda, which clients call by position.

Layouts and meanings are those of `flash_attn_interface`; no function here is differentiable. A tensor that may be None
and is to be written (out, dq, dk, dv) is made if it is None. `gen` must be None. `zero_tensors` is ignored. rng_state
is int64 (2,), with dropout's seed first. softmax_d is rowsum(dout * out), in softmax_lse's type and shape.
"""

from typing import Any

import torch
from torch import Tensor

from ...attention.api import attention_backward
from ...values.dropout import Dropout
from ...values.layout import Layout, Varlen
from .arguments import Length, Options, check_absent, number, options, refuse
from .cache import Angles, Cache, attend_cache, cached_parts
from .call import forward

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> list[Tensor]:
    """Return out, softmax_lse, S_dmask and rng_state of q (B, M, H, D), k and v (B, N, H_k, D)."""
    refuse("fwd", gen=gen)
    sides = window_size_left, window_size_right
    chosen = options(softmax_scale, is_causal, sides, softcap, alibi_slopes, dropout=p_dropout)
    return _forward(q, k, v, out, chosen, return_softmax)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    p_dropout: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
    num_splits: int = 0,
) -> list[Tensor]:
    """Return out, softmax_lse, S_dmask and rng_state of packed q (T, H, D), k and v (T', H_k, D)."""
    refuse("varlen_fwd", gen=gen)
    sides = window_size_left, window_size_right
    layout: Layout = Varlen(cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), number(max_seqlen_k))
    if any(t is not None for t in (seqused_k, leftpad_k, block_table)):
        given = cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), seqused_k, block_table, leftpad_k
        k, v, layout = cached_parts(k, v, *given)
    chosen = options(softmax_scale, is_causal, sides, softcap, alibi_slopes, dropout=p_dropout, layout=layout)
    return _forward(q, k, v, out, chosen, return_softmax)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    p_dropout: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Return dq, dk, dv and softmax_d, from the results of `fwd`, or of several whose keys are parts of a whole."""
    refuse("bwd", gen=gen)
    sides = window_size_left, window_size_right
    chosen = options(softmax_scale, is_causal, sides, softcap, alibi_slopes, deterministic, None, p_dropout)
    return _backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), chosen, rng_state)


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    p_dropout: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """Return dq, dk, dv and softmax_d of packed sequences, from the results of `varlen_fwd`."""
    refuse("varlen_bwd", gen=gen)
    sides = window_size_left, window_size_right
    layout = Varlen(cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), number(max_seqlen_k))
    chosen = options(softmax_scale, is_causal, sides, softcap, alibi_slopes, deterministic, None, p_dropout, layout)
    return _backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), chosen, rng_state)


def fwd_kvcache(
    q: Tensor,
    kcache: Tensor,
    vcache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seqlens_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    is_rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """Append k and v to a cache, in place; return out and softmax_lse of q and all its keys."""
    if block_table is not None:
        check_absent("with block_table", cache_batch_idx=cache_batch_idx, leftpad_k=leftpad_k)
    cache = Cache(kcache, vcache, seqlens_k, cache_batch_idx, leftpad_k, block_table)
    chosen = options(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    o, lse = attend_cache(q, k, v, cache, Angles(rotary_cos, rotary_sin, is_rotary_interleaved), chosen)
    return [o if out is None else out.copy_(o), lse]


@torch.no_grad()
def _forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, chosen: Options, return_softmax: bool
) -> list[Tensor]:
    seed = Dropout(chosen.dropout).seed(None, q)
    o, lse, S_dmask = forward((q, k, v), chosen, seed, return_softmax)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if seed is not None:
        rng_state[0] = seed
    return [o if out is None else out.copy_(o), lse, S_dmask, rng_state]


@torch.no_grad()
def _backward(
    results: tuple[Tensor, ...], written: tuple[Tensor | None, ...], chosen: Options, rng_state: Tensor | None
) -> list[Tensor]:
    """Return the gradients, in the tensors to be written where these are given, and softmax_d."""
    if chosen.dropout > 0.0 and rng_state is None:
        raise ValueError("rng_state must be what the forward returned if there is dropout, got None; pass it on")
    do, q, k, v, o, lse = results
    seed = rng_state[0] if rng_state is not None and chosen.dropout > 0.0 else None
    grads = attention_backward(do, q, k, v, o, lse.contiguous(), **chosen._asdict(), seed=seed)
    softmax_d = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).transpose(-1, -2)
    pairs = zip(grads, written, strict=True)
    return [*(grad if place is None else place.copy_(grad) for grad, place in pairs), softmax_d]
