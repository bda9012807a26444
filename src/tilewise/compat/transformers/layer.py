"""Compute the attention of one layer of transformers."""

from typing import Any

import torch
from torch import Tensor

from ...attention.api import attention
from ...values.cached import Cached
from ...values.intervals import Causal, Window
from ...values.layout import Varlen
from ...values.masks import Full, Mask
from ...values.score import Bias, Score, SoftCap
from ...values.value import Unsupported
from ..flash_attn.arguments import sink_of
from ..flash_attn.call import wants_gradients
from ..sdpa import mask_and_score
from .precision import PRECISION
from .view import SHARDED, MaskView

INERT = {
    "cache_position", "cu_seqlens", "indices", "labels", "logits_to_keep", "max_length_k", "max_length_q", "max_seqlen",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip
"""What layers pass along and attention does not need; an indexer's `indices` are in the mask, too."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output (B, M, H, D_v), contiguous, and None for the weights, as transformers' attention interface.

    query: (B, H, M, D); key and value: (B, H_k, N, D) and (B, H_k, N, D_v), not repeated. attention_mask: a MaskView,
    a bool tensor, or a floating one to add, which broadcast to (B, H, M, N); None asks is_causal. s_aux: sinks (H,).
    position_bias: floating, broadcast to (B, H, M, N). Sinks and biases get gradients. Raises Unsupported for what
    attention cannot do, TypeError for an argument that is not known, ValueError for a mask that does not fit.
    """
    cu = _cu_seqlens(others)
    _refuse_unknown(type(module).__name__, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not q.dtype == k.dtype == v.dtype:  # a norm may leave q and k in fp32
        q, k = q.to(v.dtype), k.to(v.dtype)
    M, N = q.shape[1], k.shape[1]
    scores: list[Score] = [] if softcap is None else [SoftCap(softcap)]
    options: dict[str, Any] = {"scale": scaling, "sink": sink_of(q, s_aux), "dropout": dropout}
    options["deterministic"] = bool(deterministic)
    if (step := _step(attention_mask, q, k, v, position_bias, options)) is not None:
        return attention(q, k, v, mask=step[0], layout=step[1], score=scores, **options), None
    precision = getattr(module, PRECISION, None) if M > 1 else None
    packed: Mask | None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = packed = _plain(causal and M > 1, sliding_window)
    else:
        mask, packed, N, biases = _prepared(attention_mask, M, N)
        scores += biases
    if position_bias is not None:
        scores.append(Bias(position_bias[..., :N]))
    sharded = getattr(attention_mask, "sharded", None) or (SHARDED[-1] if SHARDED else None)
    if sharded is not None:
        if cu is not None:
            raise Unsupported(
                "cu_seq_lens_q came to a layer of sharded rows; pass documents to tilewise.parallel.using"
            )
        if precision is not None:
            raise Unsupported(
                f"precision {precision!r} came to a layer of sharded rows; call set_precision(model, None) for 16 bits"
            )
        return sharded(q, k, v, mask=mask, score=scores, **options), None
    options["precision"] = precision
    if cu is None:
        k, v, options["score"] = k[:, :N], v[:, :N], scores
        if isinstance(attention_mask, MaskView) and precision is None:
            gradients = torch.is_grad_enabled() or module.training  # a checkpoint recomputes what runs without
            mask = attention_mask.listed(mask, q, k, v, gradients, options)
        return attention(q, k, v, mask=mask, **options), None
    if packed is None or q.shape[0] != 1:
        raise Unsupported(
            "cu_seq_lens_q came with padding, chunks or several rows, and then its documents cannot be told apart; "
            "leave attention_mask out and pass one row, or leave cu_seq_lens_q and cu_seq_lens_k out"
        )
    o = attention(q[0], k[0], v[0], mask=packed, score=scores, layout=_layout(cu, M, N, attention_mask), **options)
    return o[None], None


def _refuse_unknown(layer: str, others: dict[str, Any]) -> None:
    """Raise for an argument that would be lost silently."""
    if others.get("cache") is not None:
        raise Unsupported(
            "transformers puts keys in pages (continuous batching) under names of flash_attn alone; call "
            "tilewise.compat.install('flash_attn') before transformers is imported, and use "
            "attn_implementation='flash_attention_2'"
        )
    if others.get("output_attentions"):
        raise Unsupported(
            "tilewise never stores attention's weights (output_attentions=True); use attn_implementation='eager'"
        )
    unknown = {name for name, given in others.items() if given is not None} - INERT - {"cache", "output_attentions"}
    if unknown:
        raise TypeError(
            f"{layer}'s arguments must be among those of attention, got {', '.join(sorted(unknown))}; "
            "use attn_implementation='eager' for this model, or leave them out"
        )


def _step(
    given: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Mask, Cached] | None:
    """Return mask and layout of one step on a static cache; None where `attention` wants the mask as a tensor."""
    if not isinstance(given, MaskView) or given.cached is None or given.shape[::3] != (len(k), k.shape[1]):
        return None
    learns, wide = wants_gradients(q, k, v, options["sink"]), max(q.shape[-1], v.shape[-1]) > 256
    return None if learns or wide or q.shape[1] != 1 or bias is not None or options["dropout"] else given.cached


def _plain(causal: bool, window: int | None) -> Mask:
    """Return the mask of a layer that got none."""
    mask: Mask = Causal() if causal else Full()
    return mask if window is None else mask & Window(window - 1, None if causal else window - 1)


def _prepared(given: Any, M: int, N: int) -> tuple[Mask, Mask | None, int, tuple[Score, ...]]:
    """Return the mask, the mask of packed sequences, how many keys it is for, and scores, from what a layer got."""
    if isinstance(given, MaskView) and given.shape[2] == M:
        mask, keys, packed = given.values()
        if keys <= N <= given.shape[3]:
            return mask, packed, keys, ()
    if given.ndim != 4 or given.shape[3] not in (1, *range(N, given.shape[3] + 1)):
        raise ValueError(
            f"attention_mask must have shape (B, 1 or H, {M}, {N}), got {tuple(given.shape)}; "
            "use attn_implementation='eager' if the model adds keys after the mask was made"
        )
    drawn = (given.tensor() if isinstance(given, MaskView) else given)[..., :N]
    mask, scores = mask_and_score(drawn, causal=False)
    return mask, None, N, scores


CuSeqlens = tuple[Tensor, Tensor, Any, Any]


def _cu_seqlens(others: dict[str, Any]) -> CuSeqlens | None:
    """Take out what describes packed sequences: where they start, and the longest lengths, if they are given."""
    if others.get("cu_seq_lens_q") is None or others.get("cu_seq_lens_k") is None:
        return None
    cu = others.pop("cu_seq_lens_q"), others.pop("cu_seq_lens_k")
    return *cu, others.get("max_length_q"), others.get("max_length_k")


def _layout(cu: CuSeqlens, M: int, N: int, view: Any) -> Varlen:
    """Return the layout of packed rows. The first layer of a forward reads the device for all that have its view."""
    longest = cu[2:]
    if not all([isinstance(given, int) for given in longest]):
        longest = (M, N) if torch.compiler.is_compiling() else _longest(cu, view)  # no sequence is longer than all rows
    return Varlen(cu[0].to(torch.int32), cu[1].to(torch.int32), *longest)


def _longest(cu: CuSeqlens, view: Any) -> tuple[int, int]:
    """Return the longest lengths of queries and keys: read, unless an earlier layer of the forward has read them."""
    if not isinstance(view, MaskView):
        return int(cu[0].diff().max()), int(cu[1].diff().max())
    if view.longest is None:
        view.longest = _longest(cu, None)
    return view.longest
