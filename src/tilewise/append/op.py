"""append_ as PyTorch's dispatcher sees it, and the choice between its kernel and torch."""

import ast
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..call.check import check_contents, describe, describe_fake
from ..call.dispatch import CHECK, NAMESPACE
from ..call.operands import Operands
from ..values.layout import Layout
from ..values.rotation import Angles
from .check import reading
from .in_torch import Append, append_in_torch


def write(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Sequence[Tensor], cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, q: Tensor | None, problem: Any,
) -> Tensor:  # fmt: skip
    """Write and turn, by the kernel on a GPU with Triton, else in torch. `problem`: that of `reading`."""
    if CHECK or not k.is_cuda:
        check_contents(problem, Operands(k_new, k, v, tuple(tensors)))
    angles = None if cos is None or sin is None else Angles(cos, sin, interleaved)
    call = Append(problem.recipe.layout_of(tensors), angles, problem.N)
    y = k_new.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch = _launcher() if k.is_cuda and problem.B else None
    if launch is None:
        with torch.no_grad():
            append_in_torch(k, v, k_new, v_new, q, y, call)
    else:
        launch(k, v, k_new, v_new, q, None if q is None else y, call)
    return y


def repeated(
    given: Sequence[Tensor], q: Tensor | None, y: Tensor, layout: Layout, angles: Sequence[Tensor], interleaved: bool
) -> Any:
    """Return what repeats the launch of a call that has run, by host/repeat.py, or None."""
    if _launcher() is None:
        return None
    from .launch import repeated as found

    return found(given, q, y, layout, Angles(angles[0], angles[1], interleaved) if angles else None)


_names: Any = lru_cache(64)(ast.literal_eval)
"""It reads the names of a layout's tensors, which the operator takes as text."""


@cache
def _launcher() -> Any:
    """Return the kernel's launch, or None without a Triton that can compile it."""
    try:
        from ..call.backend import check_triton

        check_triton()
        from .launch import launch
    except ImportError:
        return None
    return launch


@torch.library.custom_op(f"{NAMESPACE}::append_", mutates_args=("k", "v"))
def append_op(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Sequence[Tensor], names: str, cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, q: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write new keys and values as one operator. `names` are those of the layout's tensors, as text."""
    problem = describe(*reading(k, v, k_new, tensors, _names(names)), (0, 0))
    return write(k, v, k_new, v_new, tensors, cos, sin, interleaved, q, problem)


@append_op.register_fake
def _(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Any, names: str, cos: Any, sin: Any, interleaved: bool,
    q: Tensor | None,
) -> Tensor:  # fmt: skip
    describe_fake(*reading(k, v, k_new, tensors, _names(names)), (0, 0))
    return k_new.new_empty(0) if q is None else q.new_empty(q.shape)
