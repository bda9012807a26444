"""Rotary as PyTorch's dispatcher sees it. The gradient of a rotation is the inverse rotation.

So one operator, `tilewise::rotary`, is its own derivative, of any order. It takes a list of tensors, so q and k rotate
in one launch. A GPU runs the kernel in kernel.py. Other devices, and installations without Triton, run in_torch.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.backend import launch_module
from ..call.dispatch import CHECK, NAMESPACE, OPERATORS, ReverseMode, intercepted, pick, transformed
from .in_torch import Rotation, positions, rotate_in_torch


def rotate(xs: list[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs, differentiably: by the operator if something intercepts operators, else by the eager path."""
    if intercepted([*xs, *[t for t in rotation[:4] if t is not None]]):
        return OPERATORS.rotary(xs, *rotation)
    return list((_Transformed if transformed() else _Eager).apply(rotation, *xs))


def run(xs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs, by the kernel on a GPU with Triton, else in torch. The forward checks what its inverse gets."""
    if not rotation.inverse and (CHECK or not xs[0].is_cuda):
        _check_contents(xs[0], rotation)
    if xs[0].is_cuda and (kernel := launch_module("rotary")):
        return kernel.launch(xs, rotation)
    return [rotate_in_torch(x, rotation) for x in xs]


def _save(ctx: Any, rotation: Sequence[Any]) -> None:
    """Save for the backward the rotation that it inverts."""
    ctx.save_for_backward(*rotation[:4])
    ctx.plain = rotation[4:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dys: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of those xs that want one: the inverse rotation, in one call."""
    given = {n: dy for n, dy in enumerate(dys) if wanted[n] and dy is not None}
    if not given:
        return [None] * len(dys)
    rotation = Rotation(*ctx.saved_tensors, *ctx.plain)
    dxs = rotate([*given.values()], rotation._replace(inverse=not rotation.inverse))
    found = dict(zip(given, dxs, strict=True))
    return [found.get(n) for n in range(len(dys))]


class _Eager(ReverseMode):
    """The eager path: an operator on lists would cost five times as much on the host."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, *xs: Tensor) -> Any:
        _save(ctx, rotation)
        return tuple(run(xs, rotation))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:  # type: ignore[override]
        return None, *_gradients(ctx, dys, ctx.needs_input_grad[1:])


class _Transformed(_Eager):
    """The same path under torch.func's transforms, which need a separate setup_context and a rule for vmap."""

    @staticmethod
    def forward(rotation: Rotation, *xs: Tensor) -> Any:  # type: ignore[override]
        return tuple(run(xs, rotation))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, rotation: Rotation, *xs: Tensor) -> Any:
        ys = _vmap(info.batch_size, in_dims[1:], xs, in_dims[0] or (None,) * len(rotation), rotation)
        return tuple(ys), (0,) * len(ys)


def _vmap(
    size: int, dims: Sequence[int | None], xs: Sequence[Tensor], of_rotation: Sequence[int | None], rotation: Rotation
) -> Any:
    """Fold the mapped dimension of (..., H, D) into the heads, (..., size * H, D), which all rotate alike.

    A mapped rotation runs one call at a time. The result has shape (size, ..., H, D).
    """
    if any(dim is not None for dim in of_rotation):
        calls = [pick((xs, rotation), (dims, of_rotation), index) for index in range(size)]
        each = [rotate(one, Rotation(*where)) for one, where in calls]
        return [torch.stack(ys) for ys in zip(*each, strict=True)]
    whole = [x if dim is None else x.movedim(dim, -3).flatten(-3, -2) for x, dim in zip(xs, dims, strict=True)]
    ys = rotate(whole, rotation)
    return [
        y.expand(size, *y.shape) if dim is None else y.unflatten(-2, (size, -1)).movedim(-3, 0)
        for y, dim in zip(ys, dims, strict=True)
    ]


@torch.library.custom_op(
    f"{NAMESPACE}::rotary",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor cos, Tensor sin, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, "
    "bool interleaved, bool inverse) -> Tensor[]",
)
def rotary_op(xs: Sequence[Tensor], *rotation: Any) -> list[Tensor]:
    """Rotate every x, or rotate it back if `inverse`, as one operator."""
    return run(xs, Rotation(*rotation))


@rotary_op.register_fake
def _(xs: Sequence[Tensor], *rotation: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in xs]


rotary_op.register_autograd(
    lambda ctx, dys: (_gradients(ctx, dys, ctx.needs_input_grad[0]), *(None,) * 7),
    setup_context=lambda ctx, inputs, output: _save(ctx, inputs[1:]),
)


@rotary_op.register_vmap
def _(info: Any, in_dims: Any, xs: Sequence[Tensor], *rotation: Any) -> Any:
    ys = _vmap(info.batch_size, in_dims[0], xs, in_dims[1:], Rotation(*rotation))
    return ys, [0] * len(ys)


def _check_contents(x: Tensor, rotation: Rotation) -> None:
    """Check the values in tensors. This synchronises with a GPU."""
    if rotation.cu_seqlens is not None:
        cu, total = rotation.cu_seqlens, x.shape[0]
        if int(cu[0]) != 0 or int(cu[-1]) != total or bool((cu.diff() < 0).any()):
            raise ValueError(
                f"cu_seqlens must start at 0, never decrease and end at the total of {total} rows, got {cu.tolist()}; "
                "write the cumulative sum of the lengths"
            )
    elif rotation.offsets is None:
        return  # the shapes were enough to check
    rows = positions(x, rotation)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < rotation.cos.shape[0]:
        raise ValueError(
            f"positions must lie in [0, {rotation.cos.shape[0]}), the rows of cos and sin, got {int(rows.min())} to "
            f"{int(rows.max())}; make the tables longer, or change offsets"
        )
