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

    @property
    def angles(self) -> Angles:
        """Return cos and sin as a value."""
        return Angles(self.cos, self.sin, self.interleaved)


def rotate_in_torch(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x in plain torch."""
    rows = positions(x, rotation).clamp(0, len(rotation.cos) - 1)
    return rotation.angles.rotate(x, rows, rotation.inverse)


def positions(x: Tensor, rotation: Rotation) -> Tensor:
    """Return each row's position, int64: (S,) or (B, S), for packed sequences (T,)."""
    i, offsets = torch.arange(x.shape[-3], device=x.device), rotation.offsets
    if rotation.cu_seqlens is None:
        shift = 0 if offsets is None else offsets[:, None]
    else:
        cu = rotation.cu_seqlens.long()
        b = torch.searchsorted(cu[1:], i, right=True).clamp(max=len(cu) - 2)
        shift = -cu[b] if offsets is None else offsets[b] - cu[b]
    return i + shift + rotation.offset
