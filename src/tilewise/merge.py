"""Merge partial results over disjoint sets of keys; the gradient of a sink, which is a part with one key of value 0."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys into one; differentiable in every o and lse.

    Args:
        parts: (o, lse) pairs as `attention(..., return_lse=True)` returns them, all of one shape. A row with
            lse = -inf adds nothing. Pass the sink to one part only.

    Returns:
        o (in the parts' type) and lse, as if attention had seen all keys at once. They are lse = log(sum(exp(lse_p)))
        and o = sum(exp(lse_p - lse) * o_p).

    Raises:
        TypeError, ValueError: there is no part, or the parts differ in shape, type or device.
    """
    parts = [tuple(part) for part in parts]  # type: ignore[misc]
    if not parts:
        raise ValueError(
            "merge: parts must hold at least one (o, lse) pair, got none; call attention with return_lse=True"
        )
    for index, part in enumerate(parts):
        if len(part) != 2 or not all(isinstance(t, Tensor) for t in part):
            raise TypeError(
                f"merge: part {index} must be a pair of tensors (o, lse), got "
                f"({', '.join(type(t).__name__ for t in part)}); call attention with return_lse=True"
            )
        o, lse = part
        packed = o.ndim == 3
        rows = tuple(o.shape[:-1]) if packed else (o.shape[0], o.shape[1], o.shape[2]) if o.ndim == 4 else None
        if rows is None or tuple(lse.shape) != ((rows[1], rows[0]) if packed else (rows[0], rows[2], rows[1])):
            raise ValueError(
                f"merge: part {index} must have o (B, M, H, D) and lse (B, H, M), or packed (T, H, D) and (H, T), got "
                f"{tuple(o.shape)} and {tuple(lse.shape)}; pass both as attention returns them"
            )
        if o.shape != parts[0][0].shape or o.dtype != parts[0][0].dtype or o.device != parts[0][0].device:
            first = parts[0][0]
            raise ValueError(
                f"merge: part {index} must have part 0's shape, type and device, {tuple(first.shape)}, {first.dtype} "
                f"and {first.device}, got {tuple(o.shape)}, {o.dtype} and {o.device}; convert or reshape it"
            )
    lses = torch.stack([lse for _, lse in parts])  # (parts, B, H, M)
    m = lses.detach().amax(0)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = torch.exp(lses - m)
    l = weights.sum(0)
    empty = l == 0.0
    # both calls of where keep the gradient of an empty row at zero; without them it is inf * 0
    lse = torch.where(empty, -torch.inf, m + torch.log(torch.where(empty, 1.0, l)))
    weights = (weights / torch.where(empty, 1.0, l)).transpose(-1, -2).unsqueeze(-1)  # (parts, B, M, H, 1)
    o = reduce(torch.add, (w * o.to(w.dtype) for w, (o, _) in zip(weights, parts, strict=True)))
    return o.to(parts[0][0].dtype), lse


def sink_gradient(sink: Tensor, L: Tensor, delta: Tensor) -> Tensor:
    """Sum dS = P_sink * (0 - delta) over rows: a sink (H,) is a key with value 0. L, delta: (..., H, M)."""
    dS = torch.exp(sink.to(L.dtype)[:, None] - L) * -delta
    dS = dS.masked_fill(L == -torch.inf, 0.0)  # a row without keys whose sink is -inf, or a row outside all sequences
    return dS.sum(-1).reshape(-1, sink.shape[0]).sum(0)
