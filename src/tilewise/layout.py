"""Packed sequences of different lengths (Varlen), in place of a padded batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mask import Frozen, check_strided, integer


@dataclass(frozen=True, eq=False)
class Varlen(Frozen):
    """Packed sequences, one after the other without padding: q (T, H, D), k (T', H_k, D), v (T', H_k, D_v).

    cu_q and cu_k are int32 (B + 1,) on q's device. They start at 0, never decrease, and end at the number of rows or
    before. Sequence b has the rows from cu[b] up to, not including, cu[b + 1]. max_q and max_k are the longest lengths;
    None reads them from the tensors, which synchronises with a GPU.

    Each sequence is one batch entry. Its indices i and j start at 0, and masks and dropout use its own lengths M and N.
    Rows from cu[B] on belong to no sequence: o and all gradients are 0 there, and lse is -inf.

    Raises TypeError or ValueError for a wrong type, shape or number.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int | None = None
    max_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("cu_q", "cu_k"):
            cu = getattr(self, name)
            if not isinstance(cu, Tensor):
                raise TypeError(
                    f"Varlen: {name} must be an int32 tensor of shape (B + 1,), got {type(cu).__name__}; "
                    "convert it with torch.tensor(..., dtype=torch.int32)"
                )
            if cu.dtype != torch.int32:
                raise TypeError(f"Varlen: {name} must be int32, got {cu.dtype}; convert it with .to(torch.int32)")
            check_strided(f"Varlen: {name}", cu)
            if cu.ndim != 1 or cu.shape[0] < 1:
                raise ValueError(
                    f"Varlen: {name} must have shape (B + 1,), got {tuple(cu.shape)}; "
                    "write the cumulative sum of the lengths, from 0 on"
                )
        if self.cu_q.shape != self.cu_k.shape:
            raise ValueError(
                f"Varlen: cu_q and cu_k must have one shape, got {tuple(self.cu_q.shape)} and "
                f"{tuple(self.cu_k.shape)}; give both as many sequences"
            )
        for name in ("max_q", "max_k"):
            longest = getattr(self, name)
            if longest is None:
                continue
            longest = integer(f"Varlen: {name}", longest, "an int, or None to read it from cu_seqlens")
            if longest < 0:
                raise ValueError(f"Varlen: {name} must be >= 0, got {longest}; pass None to have it read")
            object.__setattr__(self, name, longest)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Return the class name and the names of the tensors, as a recipe holds them."""
        return type(self).__name__, ("cu_q", "cu_k")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that `plain` names."""
        return self.cu_q, self.cu_k

    def to(self, device: torch.device | str | int) -> "Varlen":
        """Return the same layout with cu_q and cu_k on a device."""
        return Varlen(self.cu_q.to(device), self.cu_k.to(device), self.max_q, self.max_k)

    def longest(self) -> tuple[int, int]:
        """Return max_q and max_k, read from the tensors where they are None."""
        return (
            _longest(self.cu_q) if self.max_q is None else self.max_q,
            _longest(self.cu_k) if self.max_k is None else self.max_k,
        )


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max().clamp(min=0).item()) if cu.shape[0] > 1 else 0
