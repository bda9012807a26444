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
    """Pack the rows of hidden_states (B, S, …) where attention_mask is nonzero. This synchronises with a GPU.

    Args:
        hidden_states: (B, S, …).
        attention_mask: (B, S), bool or integer, nonzero where a row is real.
        unused_mask: (B, S) or None, nonzero where a row is packed but not used. It must not overlap attention_mask.

    Returns:
        The packed rows (n, …); their indices (n,) in the flattened batch, int64; cu_seqlens, int32 (B + 1,); the
        longest length; and seqused, int32 (B,), the number of nonzeros of each sequence's attention_mask.
    """
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(1, dtype=torch.int32)
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _starts(lengths), _longest(lengths), used.sum(1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a batch whose rows each hold several consecutive sequences. This synchronises with a GPU.

    Args:
        hidden_states: (B, S, …).
        attention_mask_in_length: integers (B, S): the lengths of each row's sequences in order, with zeros anywhere.
            [[2, 3, 0, 0, 0, 0]] means 2 positions, then 3, then one of padding.

    Returns:
        The packed rows (n, …); their indices (n,) in the flattened batch, int64; cu_seqlens, int32, for one sequence
        per nonzero length; and the longest length.
    """
    filled = attention_mask_in_length.sum(1, keepdim=True)  # (B, 1)
    real = torch.arange(hidden_states.shape[1], device=filled.device) < filled  # (B, S)
    indices = real.flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _starts(lengths), _longest(lengths)


def rearrange(tensor: Any, pattern: str, **sizes: Any) -> Any:
    """Call einops.rearrange, which flash_attn's module imports, and from there some of its users; it needs einops."""
    import einops  # type: ignore[import-not-found]

    return einops.rearrange(tensor, pattern, **sizes)


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
