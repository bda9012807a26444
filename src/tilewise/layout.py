"""Where rows live: padded batches (the default) or packed sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .mask import Frozen, check_strided, integer


@dataclass(frozen=True, eq=False)
class Varlen(Frozen):
    """Packed sequences: q (T, H, D), k (T', H_k, D), v (T', H_k, D_v); sequence b owns rows cu[b] to cu[b + 1].

    cu_q, cu_k: int32 (B + 1,), from 0 to at most the total, never decreasing, on q's device. max_q, max_k: the longest
    lengths, or None to read them, which synchronises with a GPU. Each sequence is one batch entry: M, N, i, j, the
    alignment of causal masks and the counter of dropout are its own. Rows from cu[B] on belong to no sequence: there o
    and all gradients are 0, and lse is -inf.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int | None = None
    max_k: int | None = None

    def __post_init__(self) -> None:
        for name in ("cu_q", "cu_k"):
            cu = getattr(self, name)
            if not isinstance(cu, Tensor):
                raise TypeError(f"Varlen: {name} must be an int32 tensor of shape (B + 1,), got {type(cu).__name__}")
            if cu.dtype != torch.int32:
                raise TypeError(f"Varlen: {name} must be int32, got {cu.dtype}; convert it with .to(torch.int32)")
            check_strided(f"Varlen: {name}", cu)
            if cu.ndim != 1 or cu.shape[0] < 1:
                raise ValueError(f"Varlen: {name} must have shape (B + 1,), got {tuple(cu.shape)}")
        if self.cu_q.shape != self.cu_k.shape:
            raise ValueError(
                f"Varlen: cu_q {tuple(self.cu_q.shape)} and cu_k {tuple(self.cu_k.shape)} must be of one length"
            )
        for name in ("max_q", "max_k"):
            longest = getattr(self, name)
            if longest is None:
                continue
            longest = integer(f"Varlen: {name}", longest, "an int, or None to read it from cu_seqlens")
            if longest < 0:
                raise ValueError(f"Varlen: {name} is {longest}; it must be >= 0")
            object.__setattr__(self, name, longest)

    def to(self, device: torch.device | str | int) -> "Varlen":
        """The same packed sequences, with cu_q and cu_k on a device."""
        return Varlen(self.cu_q.to(device), self.cu_k.to(device), self.max_q, self.max_k)

    def longest(self) -> tuple[int, int]:
        """max_q and max_k, read from the tensors where they were not given."""
        return (
            _longest(self.cu_q) if self.max_q is None else self.max_q,
            _longest(self.cu_k) if self.max_k is None else self.max_k,
        )


def _longest(cu: Tensor) -> int:
    return int(cu.diff().max().clamp(min=0).item()) if cu.shape[0] > 1 else 0
