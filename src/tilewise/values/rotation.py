"""Angles: the tables of rotary, and the rotation by them in plain torch, for rotary/, append/ and quantize/."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .value import FLOATING_TYPES, Frozen


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (…, heads, D), contiguous, with pairs rotated by cos and sin (…, 1, R / 2), whose type products have.

    This is the specification of all kernels that rotate rows. They round every product.
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


@dataclass(frozen=True, eq=False)
class Angles(Frozen):
    """The cosines and sines by which rotary rotates pairs, (positions, R / 2), and whether neighbours are pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def check(self, like: Tensor) -> None:
        """Raise TypeError or ValueError for tables of a wrong type, shape or device, or with a gradient."""
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            check_tensor(name, table, FLOATING_TYPES, like)
            if table.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name} must have no gradient, got requires_grad=True; pass {name}.detach()")
            if table.ndim != 2 or table.shape != self.cos.shape:
                raise ValueError(
                    f"cos and sin must have one shape (positions, R / 2), got {name} {tuple(table.shape)}; "
                    "give each position a row"
                )

    def check_columns(self, D: int) -> None:
        """Raise ValueError unless there is a column for a pair of the head size at least, and for all at most."""
        columns = self.cos.shape[1]
        if not 1 <= columns <= D // 2:
            raise ValueError(
                f"cos and sin must have between 1 and D / 2 = {D // 2} columns, got {columns}; "
                "give each pair of dimensions one"
            )

    def check_positions(self, count: int) -> None:
        """Raise ValueError if positions reach beyond the tables' rows."""
        rows = self.cos.shape[0]
        if count > rows:
            raise ValueError(
                f"cos and sin must have a row for every position up to {count - 1}, got {rows} rows; make them longer"
            )

    @property
    def pairs(self) -> int:
        """Return how many pairs of a row have an angle."""
        return self.cos.shape[1]

    def tables(self) -> tuple[Tensor, Tensor, int, int]:
        """Return cos and sin with adjacent columns, as kernels read them, and the strides of their rows."""
        cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (self.cos, self.sin))
        return cos, sin, cos.stride(0), sin.stride(0)

    def rotate(self, x: Tensor, at: Any, inverse: bool = False) -> Tensor:
        """Return x (..., heads, D) rotated by the angles of the positions `at`, an index of the tables' rows, computed
        in fp32, of fp64 in fp64."""
        kind = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (t[at].to(kind).unsqueeze(-2) for t in (self.cos, self.sin))  # (..., 1, R / 2)
        return rotated(x, cos, -sin if inverse else sin, self.interleaved)


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
