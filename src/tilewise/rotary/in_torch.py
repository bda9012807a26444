"""Rotary in plain torch, and the positions of rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..values.rotation import Angles


class Rotation(NamedTuple):
    """The angles of a rotation: each row reads cos and sin at its position, which is its index plus an offset."""

    cos: Tensor
    sin: Tensor
    offsets: Tensor | None
    cu_seqlens: Tensor | None
    offset: int
    interleaved: bool
    inverse: bool = False


def rotate_in_torch(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x in plain torch."""
    rows = positions(x, rotation).clamp(0, rotation.cos.shape[0] - 1)
    return Angles(rotation.cos, rotation.sin, rotation.interleaved).rotate(x, rows, rotation.inverse)


def positions(x: Tensor, rotation: Rotation) -> Tensor:
    """Return each row's position, int64: (S,) or (B, S), for packed sequences (T,)."""
    if rotation.cu_seqlens is None:
        i = torch.arange(x.shape[1], device=x.device) + rotation.offset
        return i if rotation.offsets is None else i + rotation.offsets[:, None]
    t = torch.arange(x.shape[0], device=x.device)
    cu = rotation.cu_seqlens.long()
    b = torch.searchsorted(cu[1:], t, right=True).clamp(max=cu.shape[0] - 2)
    i = t - cu[b] + rotation.offset
    return i if rotation.offsets is None else i + rotation.offsets[b]
