"""Conversion between padded batches and packed sequences, in plain, differentiable torch."""

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return rows `indices` (n,) of input (rows, …), as (n, …). A row taken twice gets the sum of both gradients."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows as `index_first_axis` does, and input itself, for a residual connection."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros (first_axis_dim, …) with values (n, …) in the rows `indices` (n,), which must be distinct."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a batch (batch, seqlen, …) from packed rows (n, …), with zeros as padding.

    `indices` (n,) are the rows' positions in the flattened batch.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of hidden_states (B, S, …) where attention_mask or unused_mask is nonzero: both (B, S), disjoint.

    Returns the packed rows (n, …); their indices (n,) in the flattened batch, int64; cu_seqlens, int32 (B + 1,); the
    longest length; and seqused, int32 (B,): how many nonzeros attention_mask has. This synchronises with a GPU.
    """
    used = attention_mask != 0
    packed = used if unused_mask is None else used | (unused_mask != 0)
    return *_packed(hidden_states, packed, packed.sum(1, dtype=torch.int32)), used.sum(1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a batch (B, S, …) whose rows each hold several consecutive sequences. This synchronises with a GPU.

    attention_mask_in_length (B, S) has the lengths of each row's sequences in order, with zeros anywhere:
    [[2, 3, 0, 0, 0, 0]] means 2 positions, then 3, then one of padding. Returns what `unpad_input` does, without
    seqused; cu_seqlens has one sequence for each nonzero length.
    """
    filled = attention_mask_in_length.sum(1, keepdim=True)  # (B, 1)
    real = torch.arange(hidden_states.shape[1], device=filled.device) < filled  # (B, S)
    return _packed(hidden_states, real, attention_mask_in_length[attention_mask_in_length != 0])


def _packed(hidden_states: Tensor, packed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the rows where `packed` (B, S) is true, their indices, cu_seqlens and the longest length."""
    indices = packed.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts_of(lengths), longest


def starts_of(lengths: Tensor) -> Tensor:
    """Return int32 (B + 1,): where packed sequences of these lengths start, and their sum."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def rearrange(tensor: Any, pattern: str, **sizes: Any) -> Any:
    """Call einops.rearrange, which flash_attn's module imports, and from there some of its users; it needs einops."""
    import einops  # type: ignore[import-not-found]

    return einops.rearrange(tensor, pattern, **sizes)
