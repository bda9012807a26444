"""Caches of FlashAttention-2 and -3: append to them; attend to their keys, in pages or in parts of sequences."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...append.api import append_
from ...attention.api import attention
from ...rotary.api import rotary
from ...values.cached import Cached
from ...values.masks import Full
from ...values.products import Quantized
from .arguments import Options, check_used, together


class Cache(NamedTuple):
    """The arguments of flash_attn_with_kvcache that say where keys are, and where new ones go."""

    k: Tensor | Quantized
    v: Tensor | Quantized
    lengths: int | Tensor | None
    index: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    cu_q: Tensor | None = None
    cu_new: Tensor | None = None
    max_q: int | None = None


class Angles(NamedTuple):
    """Its arguments that turn q and the new keys. `positions` replace the cache's lengths."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    positions: Tensor | None = None


@torch.no_grad()
def attend_cache(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: Cache, angles: Angles, chosen: Options
) -> tuple[Tensor, Tensor]:
    """Append k and v to a cache, if they are given, and return o and lse of q and all its keys."""
    before = check_cache(k, v, cache, angles)
    if k is None or v is None:
        layout = layout_of(cache, before, cache.cu_q)
    else:
        added = k.shape[1] if cache.cu_new is None else cache.cu_new.diff()
        after = before + added
        layout = layout_of(cache, after, cache.cu_q)
        turns = angles.cos is not None and angles.sin is not None
        alike = cache.cu_q is cache.cu_new and q.shape[:-2] == k.shape[:-2]
        if turns and alike and angles.positions is None and not isinstance(chosen.mask, Full):
            q = append_(  # type: ignore[assignment]
                cache.k,
                cache.v,
                k,
                v,
                layout=layout,
                cos=angles.cos,
                sin=angles.sin,
                interleaved=angles.interleaved,
                q=q,
            )
        else:
            if turns:
                at = before if angles.positions is None else angles.positions
                q = turned(q, angles, at, cache.cu_q, at_once=isinstance(chosen.mask, Full))
                k = turned(k, angles, at, cache.cu_new)
            append_(cache.k, cache.v, k, v, layout=layout_of(cache, after, cache.cu_new))
    o, lse = attention(q, cache.k, cache.v, layout=layout, return_lse=True, **chosen._asdict())
    return o, lse


def check_cache(k: Tensor | None, v: Tensor | None, cache: Cache, angles: Angles) -> Tensor:
    """Return the cache's lengths before new keys, int32 (B,). Raise ValueError for what FlashAttention refuses."""
    together(k=k, v=v)
    together(rotary_cos=angles.cos, rotary_sin=angles.sin)
    if k is None:
        for name, given in (("rotary_cos", angles.cos), ("cu_seqlens_k_new", cache.cu_new)):
            if given is not None:
                raise ValueError(f"{name} must be None without k, got a value; leave it out, or pass k")
    if angles.positions is not None and angles.cos is None:
        raise ValueError("rotary_seqlens must be None without rotary_cos, got a value; leave it out, or pass both")
    if k is not None and cache.lengths is None:
        raise ValueError("cache_seqlens must be given with k, got None; pass the lengths before the new keys")
    if isinstance(cache.lengths, Tensor):
        return cache.lengths
    keys = cache.k.x if isinstance(cache.k, Quantized) else cache.k
    sequences = cache.index if cache.index is not None else cache.table if cache.table is not None else keys
    full = keys.shape[1] * (1 if cache.table is None else cache.table.shape[1])
    length = full if cache.lengths is None else cache.lengths
    return torch.full((sequences.shape[0],), length, dtype=torch.int32, device=keys.device)


def layout_of(cache: Cache, lengths: Tensor, cu_q: Tensor | None) -> Cached:
    """Return a cache's layout, for queries in a batch or packed."""
    max_q = cache.max_q if cu_q is not None else None
    return Cached(lengths, cache.table, starts=cache.leftpad, cu_q=cu_q, max_q=max_q, index=cache.index)


def turned(x: Tensor, angles: Angles, at: Tensor, cu: Tensor | None, at_once: bool = False) -> Tensor:
    """Return x turned from position `at` of each sequence on; with `at_once`, all of its rows by that position."""
    if angles.cos is None or angles.sin is None:
        return x
    tables = angles.cos, angles.sin
    if not at_once:
        return rotary(x, *tables, interleaved=angles.interleaved, offsets=at, cu_seqlens=cu)
    if cu is None:
        rows, D = x.shape[0], x.shape[-1]
        return rotary(x.reshape(rows, 1, -1, D), *tables, interleaved=angles.interleaved, offsets=at).view(x.shape)
    each = torch.repeat_interleave(at, cu.diff(), output_size=x.shape[0])
    return rotary(x[:, None], *tables, interleaved=angles.interleaved, offsets=each)[:, 0]


def cached_parts(
    k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, used: Tensor | None,
    table: Tensor | None = None, leftpad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Cached]:  # fmt: skip
    """Return k, v and the layout of sequences that use their first `used` keys; None stands for all.

    The keys are packed, padded where cu_k is None, or in the pages of `table`.
    """
    of_q: dict[str, Any] = {"cu_q": cu_q, "max_q": None if cu_q is None else max_q}
    sequences = table if table is not None else k if cu_k is None else cu_k[1:]
    if used is not None:
        check_used("seqused_k", used, sequences.shape[0])
    if table is not None or cu_k is None:  # Cached cuts lengths to the capacity
        lengths = used if used is not None else _capacities(k, table) if cu_k is None else cu_k.diff()
        return k, v, Cached(lengths, table, starts=leftpad, **of_q)
    lengths = cu_k.diff() if used is None else torch.minimum(used.to(torch.int32), cu_k.diff())
    starts = cu_k[:-1] if leftpad is None else cu_k[:-1] + leftpad
    layout = Cached(cu_k[:-1] + lengths, starts=starts, index=torch.zeros_like(lengths), **of_q)
    return k[None], v[None], layout


def _capacities(k: Tensor, table: Tensor | None) -> Tensor:
    """Return int32 (B,): how many keys sequences have in k, all of which count."""
    B, N = k.shape[:2] if table is None else (table.shape[0], table.shape[-1] * k.shape[1])
    return k.new_full((B,), N, dtype=torch.int32)
