"""append_ in plain torch, and where new keys lie in a cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..values.rotation import turned


class Append(NamedTuple):
    """What `append_` does beside its operands: the layout's tensors by name, the angles, and the cache's rows."""

    layout: Mapping[str, Tensor]
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    capacity: int
    kind: Any = None
    """All that a launch depends on but addresses, if it is known."""


def append_in_torch(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor, call: Append
) -> None:
    """Write and turn, in plain torch."""
    b, row, there = places(k_new, call)
    if call.cos is not None and call.sin is not None:
        at = row.masked_fill(~there, 0).clamp(0, len(call.cos) - 1)
        c, s = (t[at].to(torch.promote_types(k_new.dtype, torch.float32))[:, None] for t in (call.cos, call.sin))
        k_new = turned(k_new.reshape(-1, *k_new.shape[-2:]), c, s, call.interleaved)
        if q is not None:
            y.copy_(turned(q.reshape(-1, *q.shape[-2:]), c, s, call.interleaved).view(y.shape))
    t, b, row, entry = addresses(b, row, there, k, call)
    for name, pages, new in (("k_scale", k, k_new), ("v_scale", v, v_new)):
        rows = new.reshape(-1, *new.shape[-2:])[t]
        if name in call.layout:
            factor = call.layout[name].expand(len(call.layout["lengths"]), k.shape[2])[b][..., None]
            bits = (rows.float() / factor).clamp(-448.0, 448.0).to(pages.dtype).view(torch.uint8)
            pages.view(torch.uint8)[entry, row] = bits
        else:
            pages[entry, row] = rows.to(pages.dtype)


def places(k_new: Tensor, call: Append) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each new key its sequence, its row, and whether a sequence has it."""
    lengths = call.layout["lengths"].long()
    B, count = len(lengths), k_new.shape[:-2].numel()
    t = torch.arange(count, device=k_new.device)
    if "cu_q" in call.layout:
        ends = call.layout["cu_q"].long().clamp(0, count)
        b = torch.searchsorted(ends, t, right=True) - 1
        there, row = (b >= 0) & (b < B), torch.zeros_like(t)
        own = b[there]
        row[there] = lengths[own] - (ends[own + 1] - t[there])
        return b, row, there
    M = max(1, k_new.shape[1])
    return t // M, lengths[t // M] - M + t % M, torch.ones_like(t, dtype=torch.bool)


def addresses(b: Tensor, row: Tensor, there: Tensor, k: Tensor, call: Append) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of the new keys that the cache has room for their numbers, sequences, rows, and entries or pages."""
    layout, P = call.layout, max(1, k.shape[1])
    t = there.nonzero()[:, 0]
    b, row = b[t], row[t]
    fits = (row >= (layout["starts"].long()[b] if "starts" in layout else 0)) & (row < call.capacity)
    t, b, row = t[fits], b[fits], row[fits]
    entry = layout["index"].long()[b] if "index" in layout else b
    if "table" in layout:
        table = layout["table"].long()
        fits = (entry >= 0) & (entry < len(table))
        t, b, row = t[fits], b[fits], row[fits]
        entry, row = table[entry[fits], row // P], row % P
    fits = (entry >= 0) & (entry < len(k))
    return t[fits], b[fits], row[fits], entry[fits]
