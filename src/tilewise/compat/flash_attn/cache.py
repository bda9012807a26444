"""Caches of FlashAttention-2 and -3: append to them; attend to their keys, in pages or in parts of sequences."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...append.api import append_
from ...attention.api import attention
from ...rotary.api import rotary
from ...values.cached import Cached
from ...values.layout import PADDED, Layout, Varlen
from ...values.masks import Full
from ...values.quantized import Quantized
from ...values.value import Unsupported
from .arguments import NO_DESCALES, Descales, Options, check_absent, check_used, in_e4m3, quantized, together


class Cache(NamedTuple):
    """The arguments of flash_attn_with_kvcache that say where keys are, and where new ones go."""

    k: Tensor
    v: Tensor
    lengths: int | Tensor | None
    index: Tensor | None = None
    leftpad: Tensor | None = None
    table: Tensor | None = None
    cu_q: Tensor | None = None
    cu_new: Tensor | None = None
    max_q: int | None = None
    descales: Descales = NO_DESCALES

    def layout(self, lengths: Tensor, cu_q: Tensor | None) -> Cached:
        """Return the cache's layout, for rows in a batch or packed."""
        max_q = None if cu_q is None else self.max_q
        return Cached(lengths, self.table, starts=self.leftpad, cu_q=cu_q, max_q=max_q, index=self.index)


class Angles(NamedTuple):
    """Its arguments that rotate q and the new keys. `positions` replace the cache's lengths."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    positions: Tensor | None = None

    def tables(self) -> dict[str, Any]:
        """Return what `rotary` and `append_` take."""
        return {"cos": self.cos, "sin": self.sin, "interleaved": self.interleaved}

    def rotate(self, x: Tensor, at: Tensor, cu: Tensor | None = None) -> Tensor:
        """Return x rotated from position `at` of each sequence on."""
        return rotary(x, **self.tables(), offsets=at, cu_seqlens=cu)

    def rotate_at_once(self, x: Tensor, at: Tensor, cu: Tensor | None) -> Tensor:
        """Return x with all rows of a sequence rotated by position `at`."""
        if cu is None:
            return self.rotate(x.reshape(x.shape[0], 1, -1, x.shape[-1]), at).view(x.shape)
        return self.rotate(x[:, None], torch.repeat_interleave(at, cu.diff(), output_size=x.shape[0]))[:, 0]


@torch.no_grad()
def attend_cache(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: Cache, angles: Angles, chosen: Options
) -> tuple[Tensor, Tensor]:
    """Append k and v to a cache, if they are given, and return o and lse of q and all its keys."""
    before = check_cache(k, v, cache, angles)
    if in_e4m3(q) and angles.cos is not None:
        raise Unsupported(
            "flash_attn_with_kvcache: rotary_cos is not None, but q is in e4m3; rotate q and k before, and leave it out"
        )
    x: Any
    x, keys, values = cache_of(q, cache.k, cache.v, cache.cu_q, len(before), cache.descales)
    if k is None or v is None:
        layout = cache.layout(before, cache.cu_q)
    else:
        if in_e4m3(q):
            pairs, sizes = ((k, keys.scale), (v, values.scale)), (len(before), k.shape[-2])
            k, v = (Quantized(t, scale).in_fp32(layout_of(cache.cu_new), 1, *sizes) for t, scale in pairs)
        after = before + (k.shape[1] if cache.cu_new is None else cache.cu_new.diff())
        layout = cache.layout(after, cache.cu_q)
        of_new = layout if cache.cu_q is cache.cu_new else cache.layout(after, cache.cu_new)
        at_once, alike = isinstance(chosen.mask, Full), of_new is layout and x.shape[:-2] == k.shape[:-2]
        if angles.cos is not None and alike and angles.positions is None and not at_once:
            x = append_(keys, values, k, v, layout=layout, q=x, **angles.tables())
        else:
            if angles.cos is not None:
                at = before if angles.positions is None else angles.positions
                x = (angles.rotate_at_once if at_once else angles.rotate)(x, at, cache.cu_q)
                k = angles.rotate(k, at, cache.cu_new)
            append_(keys, values, k, v, layout=of_new)
    return attention(x, keys, values, **chosen._replace(layout=layout)._asdict(), return_lse=True)


def cache_of(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, B: int, descales: Descales) -> tuple[Any, Any, Any]:
    """Return q in bf16, and Quantized keys and values of a cache, which is read so; 16-bit tensors as they are."""
    if not in_e4m3(q):
        return q, k, v
    of_q, of_k, of_v = quantized((q, k, v), descales)
    return of_q.in_fp32(layout_of(cu_q), 0, B, k.shape[-2]).to(torch.bfloat16), of_k, of_v


def layout_of(cu: Tensor | None) -> Layout:
    """Return the layout of rows that may be packed."""
    return PADDED if cu is None else Varlen(cu, cu)


def check_cache(k: Tensor | None, v: Tensor | None, cache: Cache, angles: Angles) -> Tensor:
    """Return the cache's lengths before new keys, int32 (B,). Raise ValueError for what FlashAttention refuses."""
    together(k=k, v=v)
    together(rotary_cos=angles.cos, rotary_sin=angles.sin)
    if k is None:
        instead = "leave it out, or pass k"
        check_absent("without k", instead, rotary_cos=angles.cos, cu_seqlens_k_new=cache.cu_new)
    if angles.cos is None:
        check_absent("without rotary_cos", "leave it out, or pass both", rotary_seqlens=angles.positions)
    if k is not None and cache.lengths is None:
        raise ValueError("cache_seqlens must be given with k, got None; pass the lengths before the new keys")
    if isinstance(cache.lengths, Tensor):
        return cache.lengths
    sequences = next(t for t in (cache.index, cache.table, cache.k) if t is not None)
    length = capacity(cache.k, cache.table) if cache.lengths is None else cache.lengths
    return torch.full((sequences.shape[0],), length, dtype=torch.int32, device=cache.k.device)


def capacity(k: Tensor, table: Tensor | None) -> int:
    """Return how many keys of a sequence k has room for."""
    return k.shape[1] * (1 if table is None else table.shape[-1])


def cached_parts(
    k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, used: Tensor | None,
    table: Tensor | None = None, leftpad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Cached]:  # fmt: skip
    """Return k, v and the layout of sequences that use their first `used` keys; None stands for all.

    The keys are packed, padded where cu_k is None, or in the pages of `table`.
    """
    sequences = table if table is not None else k if cu_k is None else cu_k[1:]
    if used is not None:
        check_used("seqused_k", used, sequences.shape[0])
    starts, index, max_q = leftpad, None, None if cu_q is None else max_q
    if used is not None:
        lengths = used  # Cached cuts them to the capacity
    elif cu_k is not None:
        lengths = cu_k.diff()
    else:
        lengths = k.new_full(sequences.shape[:1], capacity(k, table), dtype=torch.int32)
    if table is None and cu_k is not None:  # rows of one entry
        k, v, index = k[None], v[None], torch.zeros_like(cu_k[1:])
        starts = cu_k[:-1] if leftpad is None else cu_k[:-1] + leftpad
        lengths = cu_k[:-1] + torch.minimum(lengths.to(torch.int32), cu_k.diff())
    return k, v, Cached(lengths, table, starts=starts, cu_q=cu_q, max_q=max_q, index=index)
