"""append_ in plain torch, and where new keys lie in a cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..values.layout import Layout
from ..values.rotation import Angles


class Append(NamedTuple):
    """What `append_` does beside its operands: the layout, the angles, and the cache's rows."""

    layout: Layout
    angles: Angles | None
    capacity: int


def append_in_torch(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor, call: Append
) -> None:
    """Write and turn, in plain torch."""
    b, row, there = places(k_new, call)
    if call.angles is not None:
        at = row.masked_fill(~there, 0).clamp(0, len(call.angles.cos) - 1)
        k_new = call.angles.rotate(k_new.reshape(-1, *k_new.shape[-2:]), at)
        if q is not None:
            y.copy_(call.angles.rotate(q.reshape(-1, *q.shape[-2:]), at).view(y.shape))
    t, b, row, entry = addresses(b, row, there, k, call)
    for scale, pages, new in ((call.layout.k_scale, k, k_new), (call.layout.v_scale, v, v_new)):
        rows = new.reshape(-1, *new.shape[-2:])[t]
        if scale is not None:
            factor = scale.expand(len(call.layout.lengths), k.shape[2])[b][..., None]
            bits = (rows.float() / factor).clamp(-448.0, 448.0).to(pages.dtype).view(torch.uint8)
            pages.view(torch.uint8)[entry, row] = bits
        else:
            pages[entry, row] = rows.to(pages.dtype)


def places(k_new: Tensor, call: Append) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each new key its sequence, its row, and whether a sequence has it."""
    lengths, cu_q = call.layout.lengths.long(), call.layout.cu_q
    B, count = len(lengths), k_new.shape[:-2].numel()
    t = torch.arange(count, device=k_new.device)
    if cu_q is not None:
        ends = cu_q.long().clamp(0, count)
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
    fits = (row >= (0 if layout.starts is None else layout.starts.long()[b])) & (row < call.capacity)
    t, b, row = t[fits], b[fits], row[fits]
    entry = b if layout.index is None else layout.index.long()[b]
    if layout.table is not None:
        table = layout.table.long()
        fits = (entry >= 0) & (entry < len(table))
        t, b, row = t[fits], b[fits], row[fits]
        entry, row = table[entry[fits], row // P], row % P
    fits = (entry >= 0) & (entry < len(k))
    return t[fits], b[fits], row[fits], entry[fits]
