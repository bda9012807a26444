"""append_ in plain torch, and where new keys lie in a cache."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..values.cached import Cached
from ..values.rotation import Angles


class Append(NamedTuple):
    """The arguments of `append_`, with k and v as tensors, and their scales in the layout."""

    k: Tensor
    v: Tensor
    k_new: Tensor
    v_new: Tensor
    layout: Cached
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    q: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that are there, those of the layout last."""
        own = self.k, self.v, self.k_new, self.v_new, self.q, self.cos, self.sin
        of_layout = self.layout.tensors if is_compiling() else self.layout.captured
        return [*[t for t in own if t is not None], *of_layout]

    @property
    def angles(self) -> Angles | None:
        """Return the angles of rotary, or None."""
        return None if self.cos is None or self.sin is None else Angles(self.cos, self.sin, self.interleaved)


def append_in_torch(call: Append, y: Tensor | None) -> None:
    """Write new keys and values into the cache, and q into y; keys and q with rotary applied."""
    layout, angles = call.layout, call.angles
    k_new, v_new = call.k_new.flatten(0, -3), call.v_new.flatten(0, -3)
    t, b, row = rows_of_new(layout, len(k_new), call.k_new.shape[-3])
    if angles is not None:
        position = row.new_zeros(len(k_new)).index_copy(0, t, row).clamp(0, len(angles.cos) - 1)
        k_new = angles.rotate(k_new, position)
        if call.q is not None and y is not None:
            y.copy_(angles.rotate(call.q.flatten(0, -3), position).view(y.shape))
    entry, row, exists = layout.locate(b, row, call.k)
    t, b, entry, row = t[exists], b[exists], entry[exists], row[exists]
    for scale, cache, new in ((layout.k_scale, call.k, k_new[t]), (layout.v_scale, call.v, v_new[t])):
        if scale is None:
            cache[entry, row] = new.to(cache.dtype)
        else:
            factor = scale.expand(len(layout.lengths), cache.shape[2])[b][..., None]
            codes = (new.float() / factor).clamp(-448.0, 448.0).to(cache.dtype)
            cache.view(torch.uint8)[entry, row] = codes.view(torch.uint8)


def rows_of_new(layout: Cached, count: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which of `count` new keys belong to a sequence, to which, and their rows."""
    lengths, offsets = layout.lengths.long(), layout.offsets(M).long().clamp(0, count)
    t = torch.arange(count, device=lengths.device)
    b = torch.searchsorted(offsets, t, right=True) - 1
    t = ((b >= 0) & (b < len(lengths))).nonzero()[:, 0]
    b = b[t]
    return t, b, lengths[b] - (offsets[b + 1] - t)
