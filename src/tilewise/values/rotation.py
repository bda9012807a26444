"""Turn rows by rotary in plain torch, and check its tables: for rotary/, append/ and quantize/."""

from typing import Any

import torch
from torch import Tensor

from .value import FLOATING_TYPES


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (…, heads, D), contiguous, with its pairs turned by cos and sin (…, 1, R / 2), whose type products have.

    This is the specification of all kernels that turn rows. They round every product.
    """
    y = x.clone(memory_format=torch.contiguous_format)
    y_0, y_1 = pairs(y, 2 * cos.shape[-1], interleaved)
    x_0, x_1 = y_0.to(cos.dtype, copy=True), y_1.to(cos.dtype, copy=True)
    y_0.copy_(x_0 * cos - x_1 * sin)
    y_1.copy_(x_1 * cos + x_0 * sin)
    return y


def pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second element of each pair, (…, R / 2)."""
    return (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])


def check_tables(like: Tensor, cos: Any, sin: Any) -> None:
    """Raise TypeError or ValueError for tables of a wrong type, two shapes or another device, or with a gradient."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, FLOATING_TYPES, like)
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must have no gradient, got requires_grad=True; pass {name}.detach()")
        if table.ndim != 2 or table.shape != cos.shape:
            raise ValueError(
                f"cos and sin must have one shape (positions, R / 2), got {name} {tuple(table.shape)}; "
                "give each position a row"
            )


def check_columns(columns: int, D: int) -> None:
    """Raise ValueError unless tables have a column for at least one pair of the head size, and for no more than all."""
    if not 1 <= columns <= D // 2:
        raise ValueError(
            f"cos and sin must have between 1 and D / 2 = {D // 2} columns, got {columns}; "
            "give each pair of dimensions one"
        )


def check_positions(count: int, rows: int) -> None:
    """Raise ValueError if positions reach beyond the tables' rows."""
    if count > rows:
        raise ValueError(
            f"cos and sin must have a row for every position up to {count - 1}, got {rows} rows; make them longer"
        )


def check_tensor(name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], like: Tensor) -> None:
    """Raise TypeError or ValueError for what is no tensor of these types on `like`'s device."""
    if isinstance(tensor, Tensor) and tensor.dtype in dtypes:
        if tensor.device == like.device:
            return
        raise ValueError(f"all tensors must be on {like.device}, got {name} on {tensor.device}; move it with .to(...)")
    allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a tensor of type {allowed}, got {type(tensor).__name__}; "
            "convert it with torch.as_tensor(...)"
        )
    raise TypeError(f"{name} must be of type {allowed}, got {tensor.dtype}; convert it with .to(...)")
