"""Attention masks: which keys each query sees. Combine them with `&`.

A mask has a PyTorch form and a kernel form. `keep` is the PyTorch form, for the reference and the CPU. `device` names
the kernel functions in tile/masks.py, `captures` and `shapes` describe the tensors that they read, and `arguments`
returns their arguments. Row indices i are shifted by N - M, so that the last query is aligned with the last key.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .value import OPEN, Ends, Value


class Mask(Value):
    """Every mask derives from this class. `mask & other` shows the keys that both show."""

    lists: tuple[Any, ...] = ()
    """TileLists of its tiles, which `tilewise.listed` has made."""
    held: Any = None
    """Its numbers on the host, where `tilewise.parallel.fixed` has read them."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """Return the masks whose intersection this one is; none for Full."""
        return (self,)

    @property
    def hides_later_keys(self) -> bool:
        """Tell whether the mask hides every key after its query, whatever its tensors hold."""
        return False

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self.parts + other.parts)

    def keys(self, i: Any) -> Ends:
        """Return the first key that row i sees and the one after its last, before clamping to [0, N).

        Only interval masks have it.
        """
        return -OPEN, OPEN

    def ends(self, i: Any, shift: int) -> Ends:
        """Return the same for a mask that may need `shift` = N - M, which i contains, to find the row."""
        return self.keys(i)

    def keep(self, i: Tensor, j: Tensor, shift: int) -> Tensor:
        """Return a bool tensor, broadcast to (B, H, rows, columns): whether row i sees key j.

        i is shifted by `shift` = N - M already.
        """
        lo, hi = self.ends(i, shift)
        return (j >= lo) & (j < hi)

    def dense(self, M: int, N: int) -> Tensor:
        """Return the whole mask as a bool tensor that broadcasts to (B, H, M, N), for the reference and plots."""
        device = next((t.device for part in self.parts for t in part.tensors), torch.device("cpu"))
        i, j = torch.arange(M, device=device)[:, None] + (N - M), torch.arange(N, device=device)[None, :]
        seen = torch.ones(M, N, dtype=torch.bool, device=device)
        for part in self.parts:
            seen = seen & part.keep(i, j, N - M)
        return seen


class Several(Mask):
    """A mask of several parts, or of none."""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return tuple([said for part in (*self.parts, *self.lists) for said in part.key])

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        return tuple([t for part in (*self.parts, *self.lists) for t in part.captured])


@dataclass(frozen=True, eq=False)
class Full(Several):
    """Show every key to every query."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class And(Several):
    """Show the keys that all of `masks` show; written `a & b`."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def to(self, device: torch.device | str | int) -> "And":
        return And(tuple([mask.to(device) for mask in self.masks]))


@dataclass(frozen=True, eq=False)
class Listed(Several):
    """Show what `mask` shows, and carry lists of its tiles. `listed & other` is `mask & other`, whose tiles differ."""

    mask: Mask
    lists: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts

    def to(self, device: torch.device | str | int) -> "Listed":
        return Listed(self.mask.to(device), tuple([one.to(device) for one in self.lists]))


def intersect(parts: tuple[Mask, ...]) -> Mask:
    """Return the intersection of the masks `parts`."""
    return parts[0] if len(parts) == 1 else And(parts) if parts else Full()
