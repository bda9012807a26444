"""Rotary position embedding (RoFormer, Su et al. 2021): it rotates pairs of dimensions by an angle per position.

The gradient of a rotation is the inverse rotation. So one operator, `tilewise::rotary`, is its own derivative, of any
order. It takes a list of tensors, so q and k rotate in one launch. A GPU runs the kernel in tile/rotary.py. Other
devices, and installations without Triton, run the same in a few lines of torch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .operator import CHECK, NAMESPACE, OPERATORS, ReverseMode, intercepted, pick, refuse_forward_mode, transformed
from .problem import FLOATING_TYPES
from .turn import check_columns, check_positions, check_tables, check_tensor, turned


class Rotation(NamedTuple):
    """The angles of a rotation: each row reads cos and sin at its position, which is its index plus an offset."""

    cos: Tensor
    sin: Tensor
    offsets: Tensor | None
    cu_seqlens: Tensor | None
    offset: int
    interleaved: bool
    inverse: bool = False


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
    return _rotate({"x": x}, cos, sin, interleaved, offsets, cu_seqlens)[0]


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
    q, k = _rotate({"q": q, "k": k}, cos, sin, interleaved, offsets, cu_seqlens)
    return q, k


def _rotate(
    xs: dict[str, Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None,
) -> list[Tensor]:
    """Check the arguments, then rotate all xs."""
    x = _check_operands(xs, packed=cu_seqlens is not None)
    check_tables(x, cos, sin)
    check_columns(cos.shape[1], x.shape[-1])
    _check_places(x, offsets, cu_seqlens)
    per_sequence, shared = (offsets, 0) if isinstance(offsets, Tensor) else (None, offsets)
    rotation = Rotation(cos, sin, per_sequence, cu_seqlens, shared, bool(interleaved))
    _check_shapes(x, rotation)
    refuse_forward_mode(*xs.values(), cos, sin)
    return _apply(list(xs.values()), rotation)


def _apply(xs: list[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs, differentiably: by the operator if something intercepts operators, else by the eager path."""
    if intercepted([*xs, *[t for t in rotation[:4] if t is not None]]):
        return OPERATORS.rotary(xs, *rotation)
    return list((_Transformed if transformed() else _Eager).apply(rotation, *xs))


def _run(xs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs, by the kernel on a GPU with Triton, else in torch. What turns back was checked before."""
    if not rotation.inverse and (CHECK or not xs[0].is_cuda):
        _check_contents(xs[0], rotation)
    return _by_kernel(xs, rotation) if xs[0].is_cuda and _launcher() else [_in_torch(x, rotation) for x in xs]


def _turn_back(dys: Sequence[Tensor | None], wanted: Sequence[bool], rotation: Rotation) -> list[Tensor | None]:
    """Return the gradients of those xs that want one: the inverse rotation, in one call."""
    present = [want and dy is not None for want, dy in zip(wanted, dys, strict=True)]
    given = [dy for dy, here in zip(dys, present, strict=True) if dy is not None and here]
    dxs = iter(_apply(given, rotation._replace(inverse=not rotation.inverse)) if given else ())
    return [next(dxs) if here else None for here in present]


def _keep(ctx: Any, rotation: Sequence[Any]) -> None:
    """Save for the backward the rotation that it inverts."""
    ctx.save_for_backward(*rotation[:4])
    ctx.plain = rotation[4:]
    ctx.set_materialize_grads(False)


class _Eager(ReverseMode):
    """The eager path: an operator on lists would cost five times as much on the host."""

    @staticmethod
    def forward(ctx: Any, rotation: Rotation, *xs: Tensor) -> Any:
        _keep(ctx, rotation)
        return tuple(_run(xs, rotation))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:  # type: ignore[override]
        return None, *_turn_back(dys, ctx.needs_input_grad[1:], Rotation(*ctx.saved_tensors, *ctx.plain))


class _Transformed(_Eager):
    """The same path under torch.func's transforms, which need a separate setup_context and a rule for vmap."""

    @staticmethod
    def forward(rotation: Rotation, *xs: Tensor) -> Any:  # type: ignore[override]
        return tuple(_run(xs, rotation))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, rotation: Rotation, *xs: Tensor) -> Any:
        ys = _vmap(info.batch_size, in_dims[1:], xs, in_dims[0] or (None,) * len(rotation), rotation)
        return tuple(ys), (0,) * len(ys)


def _vmap(
    size: int, dims: Sequence[int | None], xs: Sequence[Tensor], of_turn: Sequence[int | None], rotation: Rotation
) -> Any:
    """Fold the mapped dimension of (..., H, D) into the heads, (..., size * H, D), which all rotate alike.

    A mapped rotation runs one call at a time. The result has shape (size, ..., H, D).
    """
    if any(dim is not None for dim in of_turn):
        calls = [pick((xs, rotation), (dims, of_turn), index) for index in range(size)]
        each = [_apply(one, Rotation(*where)) for one, where in calls]
        return [torch.stack(ys) for ys in zip(*each, strict=True)]
    whole = [x if dim is None else x.movedim(dim, -3).flatten(-3, -2) for x, dim in zip(xs, dims, strict=True)]
    ys = _apply(whole, rotation)
    return [
        y.expand(size, *y.shape) if dim is None else y.unflatten(-2, (size, -1)).movedim(-3, 0)
        for y, dim in zip(ys, dims, strict=True)
    ]


@torch.library.custom_op(f"{NAMESPACE}::rotary", mutates_args=())
def rotary_op(
    xs: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    interleaved: bool,
    inverse: bool,
) -> list[Tensor]:
    """Rotate every x, or rotate it back if `inverse`, as one operator."""
    return _run(xs, Rotation(cos, sin, offsets, cu_seqlens, offset, interleaved, inverse))


@rotary_op.register_fake
def _(xs: Sequence[Tensor], *rotation: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in xs]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, *rotation = inputs
    _keep(ctx, rotation)


def _differentiate(ctx: Any, dys: Sequence[Tensor | None]) -> Any:
    return _turn_back(dys, ctx.needs_input_grad[0], Rotation(*ctx.saved_tensors, *ctx.plain)), *(None,) * 7


rotary_op.register_autograd(_differentiate, setup_context=_setup)


@rotary_op.register_vmap
def _(info: Any, in_dims: Any, xs: Sequence[Tensor], *rotation: Any) -> Any:
    ys = _vmap(info.batch_size, in_dims[0], xs, in_dims[1:], Rotation(*rotation))
    return ys, [0] * len(ys)


def _in_torch(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x in plain torch."""
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = positions(x, rotation).clamp(0, rotation.cos.shape[0] - 1)
    c, s = (table[rows].to(accumulator).unsqueeze(-2) for table in (rotation.cos, rotation.sin))  # (…, 1, R / 2)
    return turned(x, c, -s if rotation.inverse else s, rotation.interleaved)


def positions(x: Tensor, rotation: Rotation) -> Tensor:
    """Return each row's position, int64: (S,) or (B, S), for packed sequences (T,)."""
    if rotation.cu_seqlens is None:
        i = torch.arange(x.shape[1], device=x.device) + rotation.offset
        return i if rotation.offsets is None else i + rotation.offsets[:, None]
    t = torch.arange(x.shape[0], device=x.device)
    cu = rotation.cu_seqlens.long()
    b = torch.searchsorted(cu[1:], t, right=True).clamp(max=cu.shape[0] - 2)
    i = t - cu[b] + rotation.offset
    return i if rotation.offsets is None else i + rotation.offsets[b]


@cache
def _launcher() -> Callable[[Sequence[Tensor], Sequence[Tensor], Rotation], None] | None:
    """Return the kernel's launcher, imported on first use; None without Triton."""
    try:
        from .host.rotary import launch
    except ImportError:
        return None
    return launch


def _by_kernel(xs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """Rotate all xs in one launch. CPU tensors work in Triton's interpreter, for tests."""
    launch = _launcher()
    assert launch is not None
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    if max(y.numel() for y in ys) > 0:
        launch(xs, ys, rotation)
    return ys


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


def _check_shapes(x: Tensor, rotation: Rotation) -> None:
    """Check what shapes alone say about positions."""
    if rotation.cu_seqlens is not None and rotation.cu_seqlens.shape[0] == 1 and x.shape[0] > 0:
        raise ValueError(f"cu_seqlens must cover all {x.shape[0]} rows, got no sequence; pass (0, …, {x.shape[0]})")
    longest = x.shape[1] if rotation.cu_seqlens is None else 1  # a sequence that has rows has at least one
    if x.shape[0] > 0 and longest > 0:
        check_positions(rotation.offset + longest, rotation.cos.shape[0])


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
