"""The functions of the flash_attn package, version 2.8, implemented by `tilewise.attention`.

Arguments have the names, order and defaults of that package. They have the same meaning in all functions:

    q                   (B, M, H, D); varlen (T, H, D)
    k, v                (B, N, H_k, D); varlen (T', H_k, D); H a multiple of H_k
    kv, qkv             k and v, or all three, stacked in front of the heads: (B, N, 2, H_k, D), (T, 3, H, D), …
    cu_seqlens          int32 (batch + 1,): where each packed sequence starts; max_seqlen: the longest one's length
    dropout_p           probability on the softmax's entries; drawn from torch's generator
    softmax_scale       default D ** -0.5
    causal              query i sees keys j <= i + N - M: aligned to the last key
    window_size         (left, right), i + N - M - left <= j <= i + N - M + right; -1 or None is open;
                        causal closes the right
    softcap             softcap * tanh(logits / softcap); 0.0 is off
    alibi_slopes        (H,) or (B, H): logits - slope * abs(i + N - M - j); no gradient
    deterministic       bitwise repeatable gradients
    s_aux               (H,) logits added to the softmax's denominator: attention sinks; differentiable
    return_attn_probs   return (out, softmax_lse, S_dmask) instead of out

softmax_lse is the natural log of the softmax's denominator: (B, H, M), varlen (H, T), fp32.

S_dmask has shape (0,) without dropout. With dropout it is (B, H, M, N) in q's type, with the longest lengths as M and
N, and zero outside a sequence. It holds the probabilities before dropout and rescaling, negated where dropout removed
them. It is for tests: it synchronises, and takes memory and time quadratic in the length.

These things differ from that package:

- The CPU, fp32, fp64 and any head size up to 512 work, too; in fp32 above 256 on the CPU alone.
- softmax_lse is differentiable, and -inf (not inf) for a row that sees no key.
- With causal ALiBi, softmax_lse belongs to the logits written above; that package leaves out a constant per row.
- S_dmask is exact, and not padded to multiples of 128.
- The dropout pattern is tilewise's, with dropout_p rounded to a multiple of 2^-16.
- s_aux is new: transformers passes sinks by this name where a function has it.

Functions that begin with an underscore are for context parallelism. They are not differentiable. A forward returns
(out, softmax_lse, S_dmask, rng_state), where S_dmask is empty without return_softmax. A backward writes dq, dk and dv
where they are not None, and returns softmax_d, rowsum(dout * out), in softmax_lse's shape. out and softmax_lse are
those of all keys, where k and v are a part of them.
"""

from torch import Tensor

from ...values.layout import Varlen
from . import flash_attn_gpu
from .arguments import Length, Sides, check_absent, number, options, sink_of
from .cache import Angles, Cache, attend_cache, cached_parts
from .call import Result, attend

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute attention of q (B, M, H, D) over k and v (B, N, H_k, D). The module describes arguments and results."""
    sink = sink_of(q, s_aux)
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, sink, dropout_p)
    return attend((q, k, v), chosen, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call flash_attn_func with q (B, M, H, D) and with k and v from kv (B, N, 2, H_k, D)."""
    k, v = _unstack(kv)
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None, dropout_p)
    return attend((q, k, v), chosen, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call flash_attn_func with q, k and v from qkv (B, N, 3, H, D)."""
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None, dropout_p)
    return attend((qkv,), chosen, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """Compute attention of packed sequences: q (T, H, D), k and v (T', H_k, D).

    With block_table (B, width), k and v are pages (pages, P, H_k, D), there is no gradient, and no dropout.
    """
    if block_table is not None:
        k, v, layout = cached_parts(k, v, cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), None, block_table)
    else:
        layout = Varlen(cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), number(max_seqlen_k))
    sink = sink_of(q, s_aux)
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, sink, dropout_p, layout)
    return attend((q, k, v), chosen, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call flash_attn_varlen_func with q (T, H, D) and with k and v from kv (T', 2, H_k, D)."""
    k, v = _unstack(kv)
    layout = Varlen(cu_seqlens_q, cu_seqlens_k, number(max_seqlen_q), number(max_seqlen_k))
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None, dropout_p, layout)
    return attend((q, k, v), chosen, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Length,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Call flash_attn_varlen_func with q, k and v from qkv (T, 3, H, D)."""
    layout = Varlen(cu_seqlens, cu_seqlens, number(max_seqlen), number(max_seqlen))
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, None, dropout_p, layout)
    return attend((qkv,), chosen, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Append k and v (B, new, H_k, D) to a cache, in place, and compute attention of q (B, M, H, D) to all its keys.

    k_cache and v_cache are (entries, capacity, H_k, D), or with block_table (B, width) pages (pages, P, H_k, D).
    cache_seqlens (B,) are the lengths before the new keys, which are rotated by rotary_cos and rotary_sin from there
    on; so is q if it is causal or has a window, else all of q by the position of the first new key. num_splits is not
    read. Returns out, or (out, softmax_lse). There is no gradient.
    """
    if block_table is not None:
        check_absent("with block_table", cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    chosen = options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    o, lse = attend_cache(q, k, v, cache, Angles(rotary_cos, rotary_sin, rotary_interleaved), chosen)
    return (o, lse) if return_softmax_lse else o


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, ...]:
    """Return (out, softmax_lse, S_dmask, rng_state) of q (B, M, H, D), k and v (B, N, H_k, D)."""
    given = alibi_slopes, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, return_softmax
    return tuple(flash_attn_gpu.fwd(q, k, v, None, *given))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, ...]:
    """Return (out, softmax_lse, S_dmask, rng_state) of packed q (T, H, D), k and v (T', H_k, D)."""
    layout = cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table
    window = window_size_left, window_size_right
    given = max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, *window, softcap, return_softmax
    return tuple(flash_attn_gpu.varlen_fwd(q, k, v, None, *layout, alibi_slopes, *given))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv, and return softmax_d (B, H, M)."""
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv
    window = window_size_left, window_size_right
    given = dropout_p, softmax_scale, causal, *window, softcap, deterministic, None, rng_state
    return flash_attn_gpu.bwd(*tensors, alibi_slopes, *given)[3]


def _flash_attn_varlen_backward(
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
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write dq, dk and dv of packed sequences, and return softmax_d (H, T)."""
    tensors = dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k
    window = window_size_left, window_size_right
    given = dropout_p, softmax_scale, zero_tensors, causal, *window, softcap, deterministic, None, rng_state
    return flash_attn_gpu.varlen_bwd(*tensors, alibi_slopes, max_seqlen_q, max_seqlen_k, *given)[3]


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _unstack(kv: Tensor) -> tuple[Tensor, ...]:
    """Return k and v of kv (…, 2, H_k, D)."""
    if kv.ndim not in (4, 5) or kv.shape[-3] != 2:
        raise ValueError(
            "kv must have shape (B, length, 2, heads, head size), or packed (T, 2, heads, head size), "
            f"got {tuple(kv.shape)}; stack k and v in front of the heads"
        )
    return kv.unbind(-3)
