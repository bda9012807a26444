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
    return_attn_probs   return (out, softmax_lse, S_dmask) instead of out

softmax_lse is the natural log of the softmax's denominator: (B, H, M), varlen (H, T), fp32.

S_dmask has shape (0,) without dropout. With dropout it is (B, H, M, N) in q's type, with the longest lengths as M and
N, and zero outside a sequence. It holds the probabilities before dropout and rescaling, negated where dropout removed
them. It is for tests: it synchronises, and takes memory and time quadratic in the length.

These things differ from that package:

- The CPU, fp32, fp64 and any head size up to 256 work, too.
- softmax_lse is differentiable, and -inf (not inf) for a row that sees no key.
- With causal ALiBi, softmax_lse belongs to the logits written above; that package leaves out a constant per row.
- S_dmask is exact, and not padded to multiples of 128.
- The dropout pattern is tilewise's, with dropout_p rounded to a multiple of 2^-16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...api import attention, attention_qkvpacked
from ...dropout import dropout_keep
from ...layout import Varlen
from ...mask import Causal, Full, Mask, Window
from ...problem import Unsupported
from ...score import Alibi, Score, SoftCap

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Sides = Sequence[int | Tensor | None]
Length = int | Tensor
Result = Any
"""out, or with return_attn_probs (out, softmax_lse, S_dmask)."""


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
) -> Result:
    """Compute attention of q (B, M, H, D) over k and v (B, N, H_k, D). The module describes arguments and results."""
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, None, dropout_p, return_attn_probs)


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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, None, dropout_p, return_attn_probs)


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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((qkv,), options, None, dropout_p, return_attn_probs)


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
) -> Result:
    """Compute attention of packed sequences: q (T, H, D), k and v (T', H_k, D). block_table must be None."""
    if block_table is not None:
        raise Unsupported(
            "flash_attn_varlen_func: block_table is not None, but keys and values in pages are not supported; "
            "gather the pages into k and v, and leave block_table out"
        )
    layout = Varlen(cu_seqlens_q, cu_seqlens_k, _number(max_seqlen_q), _number(max_seqlen_k))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, layout, dropout_p, return_attn_probs)


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
    layout = Varlen(cu_seqlens_q, cu_seqlens_k, _number(max_seqlen_q), _number(max_seqlen_k))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((q, k, v), options, layout, dropout_p, return_attn_probs)


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
    layout = Varlen(cu_seqlens, cu_seqlens, _number(max_seqlen), _number(max_seqlen))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend((qkv,), options, layout, dropout_p, return_attn_probs)


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
) -> NoReturn:
    """Raise Unsupported: tilewise has no kernel that appends to a key-value cache."""
    raise Unsupported(
        "flash_attn_with_kvcache: no kernel here appends to a key-value cache; rotate q and k with tilewise.rotary, "
        "write k and v into the cache, and call flash_attn_func on the part that is filled, or flash_attn_varlen_func "
        "if the sequences' lengths differ"
    )


class _Options(NamedTuple):
    """The arguments of a flash_attn function as options of `tilewise.attention`."""

    mask: Mask
    score: list[Score]
    scale: float | None
    deterministic: bool


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> _Options:
    left, right = (None if side is None or side < 0 else _number(side) for side in window_size)
    if causal:
        mask = Causal() if left is None else Window(left, 0)
    else:
        mask = Full() if left is None and right is None else Window(left, right)
    score: list[Score] = [] if softcap == 0.0 else [SoftCap(softcap)]
    if alibi_slopes is not None:
        score.append(Alibi(alibi_slopes))
    return _Options(mask, score, softmax_scale, deterministic)


def _attend(
    operands: tuple[Tensor, ...],
    options: _Options,
    layout: Varlen | None,
    dropout: float,
    return_attn_probs: bool,
) -> Result:
    """Run any of these functions, on q, k and v, or on qkv."""
    packed = len(operands) == 1
    attend = attention_qkvpacked if packed else attention
    if not return_attn_probs:
        return attend(*operands, **options._asdict(), dropout=dropout, layout=layout)
    seed = int(torch.randint(-(2**63), 2**63 - 1, ())) if dropout > 0.0 else None
    o, lse = attend(*operands, **options._asdict(), dropout=dropout, seed=seed, layout=layout, return_lse=True)
    if seed is None:
        return o, lse, o.new_empty(0)
    q, k, _ = operands[0].unbind(-3) if packed else operands
    q, k = q.to(o.dtype), k.to(o.dtype)  # autocast's type, if it is on
    whole = _Whole(options, dropout, seed)
    with torch.autocast(q.device.type, enabled=False):
        return o, lse, whole.padded(q, k, lse) if layout is None else whole.packed(q, k, lse, layout)


def _unstack(kv: Tensor) -> tuple[Tensor, ...]:
    if kv.ndim not in (4, 5) or kv.shape[-3] != 2:
        raise ValueError(
            "kv must have shape (B, length, 2, heads, head size), or packed (T, 2, heads, head size), "
            f"got {tuple(kv.shape)}; stack k and v in front of the heads"
        )
    return kv.unbind(-3)


def _number(number: int | Tensor) -> int:
    return int(number) if isinstance(number, Tensor) else number


class _Whole(NamedTuple):
    """It builds the whole matrix P, negated where dropout removed an entry."""

    options: _Options
    dropout: float
    seed: int

    @torch.no_grad()
    def padded(self, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """Return P (B, H, M, N) in q's type."""
        P = q.new_zeros(*lse.shape, k.shape[1])
        for b in range(P.shape[0]):
            P[b] = self.entry(b, q[b], k[b], lse[b])
        return P

    @torch.no_grad()
    def packed(self, q: Tensor, k: Tensor, lse: Tensor, layout: Varlen) -> Tensor:
        """Return P (B, H, longest M, longest N), each sequence in its upper left corner. lse: (H, T)."""
        starts_q, starts_k = layout.cu_q.tolist(), layout.cu_k.tolist()
        P = q.new_zeros(len(starts_q) - 1, q.shape[1], *layout.longest())
        for b in range(P.shape[0]):
            rows, columns = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
            corner = self.entry(b, q[rows], k[columns], lse[:, rows])
            P[b, :, : corner.shape[1], : corner.shape[2]] = corner
        return P

    def entry(self, b: int, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """Return P (H, M, N) of batch entry b, from q (M, H, D), k (N, H_k, D) and lse (H, M)."""
        (M, H, D), N = q.shape, k.shape[0]
        k = k.repeat_interleave(H // k.shape[1], 1)
        S = torch.einsum("mhd,nhd->hmn", q.to(lse.dtype), k.to(lse.dtype))[None]
        S = S * (D**-0.5 if self.options.scale is None else self.options.scale)
        i, j = torch.arange(M, device=q.device)[:, None], torch.arange(N, device=q.device)[None, :]
        for change in self.options.score:
            alone: Any = change.at(b)
            S = alone.apply(S, i + N - M, j, N - M)
        hidden = ~self.options.mask.dense(M, N).to(q.device)
        P = torch.exp(S[0] - lse[:, :, None]).masked_fill(hidden, 0.0)
        row = b * H + torch.arange(H, device=q.device)[:, None, None]
        return torch.where(dropout_keep(self.seed, row, i, j, self.dropout), P, -P).to(q.dtype)
