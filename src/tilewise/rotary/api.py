"""Rotary position embedding (RoFormer, Su et al. 2021): it rotates pairs of dimensions by an angle per position."""

import torch
from torch import Tensor

from ..call.dispatch import refuse_forward_mode
from ..values.rotation import Angles, check_tensor
from ..values.value import FLOATING_TYPES
from .in_torch import Rotation
from .op import rotate


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate each pair (x_0, x_1) to (x_0 cos - x_1 sin, x_1 cos + x_0 sin) (RoFormer, Su et al. 2021).

    Args:
        x: (B, S, H, D), any strides; fp16, bf16, fp32 or fp64. With `cu_seqlens`, (T, H, D). Differentiable.
        cos: (positions, R / 2), R at most D; any floating type. Dimensions from R on are copied. It has no gradient.
        sin: as cos.
        interleaved: pairs are neighbours (0, 1), (2, 3), … (GPT-J); else (0, R / 2), (1, R / 2 + 1), … (GPT-NeoX).
        offsets: an int >= 0, or an int32 or int64 tensor (B,), added to each row's index within its sequence.
        cu_seqlens: int32 (B + 1,), from 0 to T, never decreasing: sequence b has the rows from cu[b] up to cu[b + 1].

    Returns:
        A new contiguous tensor of x's shape and type. It is computed in fp32, in fp64 if x is fp64.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it. On a GPU, values that only a synchronisation
            could read are not checked unless TILEWISE_CHECK=1: positions outside the tables are clamped.
        RuntimeError: forward-mode differentiation was used.
    """
    return _rotate({"x": x}, Angles(cos, sin, bool(interleaved)), offsets, cu_seqlens)[0]


def rotary_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply `rotary` to q and k in one launch, forward and backward.

    Args:
        q: (B, S, H, D), any strides; fp16, bf16, fp32 or fp64. With `cu_seqlens`, (T, H, D). Differentiable.
        k: (B, S, H_k, D), with `cu_seqlens` (T, H_k, D). All but the number of heads must equal q's.
        cos, sin, interleaved, offsets, cu_seqlens: as for `rotary`.

    Returns:
        The rotated q and k, as new contiguous tensors.

    Raises:
        TypeError, ValueError, RuntimeError: as `rotary`.
    """
    q, k = _rotate({"q": q, "k": k}, Angles(cos, sin, bool(interleaved)), offsets, cu_seqlens)
    return q, k


def _rotate(xs: dict[str, Tensor], angles: Angles, offsets: int | Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Check the arguments, then rotate all xs."""
    x = _check_operands(xs, packed=cu_seqlens is not None)
    angles.check(x)
    angles.check_columns(x.shape[-1])
    _check_places(x, offsets, cu_seqlens)
    per_sequence, shared = (offsets, 0) if isinstance(offsets, Tensor) else (None, offsets)
    longest = x.shape[1] if cu_seqlens is None else 1  # a sequence that has rows has at least one
    if x.shape[0] > 0 and longest > 0:
        angles.check_positions(shared + longest)
    cos, sin, interleaved = angles.cos, angles.sin, angles.interleaved
    refuse_forward_mode(*xs.values(), cos, sin)
    return rotate(list(xs.values()), Rotation(cos, sin, per_sequence, cu_seqlens, shared, interleaved))


def _check_operands(xs: dict[str, Tensor], packed: bool) -> Tensor:
    rank, shape = (3, "(T, heads, head size)") if packed else (4, "(batch, length, heads, head size)")
    first = next(iter(xs.values()))
    for name, x in xs.items():
        check_tensor(name, x, FLOATING_TYPES, first)
        if x.ndim != rank:
            hint = "pass cu_seqlens for packed sequences" if x.ndim == 3 else "reshape it"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}; {hint}")
        if x.dtype != first.dtype:
            raise TypeError(f"q and k must have one type, got {first.dtype} and {x.dtype}; convert one of them")
        if (*x.shape[:-2], x.shape[-1]) != (*first.shape[:-2], first.shape[-1]):
            raise ValueError(
                f"q and k must agree in all but the heads, got {tuple(first.shape)} and {tuple(x.shape)}; "
                "call rotary for each"
            )
    return first


def _check_places(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> None:
    B = x.shape[0]
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, (torch.int32,), x)
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(
                f"cu_seqlens must have shape (B + 1,), got {tuple(cu_seqlens.shape)}; "
                "write the cumulative sum of the lengths, from 0 on"
            )
        B = cu_seqlens.shape[0] - 1
        if B == 0 and x.shape[0] > 0:
            raise ValueError(f"cu_seqlens must cover all {x.shape[0]} rows, got no sequence; pass (0, …, {x.shape[0]})")
    if isinstance(offsets, Tensor):
        check_tensor("offsets", offsets, (torch.int32, torch.int64), x)
        if offsets.ndim != 1 or offsets.shape[0] != B:
            raise ValueError(f"offsets must have shape (B,) = ({B},), got {tuple(offsets.shape)}; pass one int for all")
    elif isinstance(offsets, bool) or not isinstance(offsets, (int, torch.SymInt)):
        raise TypeError(
            f"offsets must be an int or an integer tensor of shape (B,), got {offsets!r}; convert it with int(...)"
        )
    elif offsets < 0:
        raise ValueError(f"offsets must be >= 0, got {offsets}; pass the position of the first row")
