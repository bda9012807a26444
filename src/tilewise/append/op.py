"""append_ as PyTorch's dispatcher sees it, and the choice between its kernel and torch."""

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.backend import launch_module
from ..call.check import check_contents, describe, describe_fake
from ..call.dispatch import CHECK, NAMESPACE
from ..values.cached import Cached
from .check import reading
from .in_torch import Append, append_in_torch


def write(call: Append, problem: Any) -> Tensor | None:
    """Write into the cache, by the kernel on a GPU with Triton, else in torch, and return q with rotary applied.

    problem: that of `reading`.
    """
    k, q = call.k, call.q
    if CHECK or not k.is_cuda:
        check_contents(problem, reading(call)[0])
    y = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel = launch_module("append") if k.is_cuda and problem.B else None
    if kernel is None:
        with torch.no_grad():
            append_in_torch(call, y)
    else:
        kernel.launch(call, y)
    return y


def _call(k: Any, v: Any, k_new: Any, v_new: Any, tensors: Sequence[Any], names: str, *others: Any) -> Append:
    """Return what the operator was given as the arguments of `append_`."""
    layout = Cached.rebuild((Cached.__name__, ast.literal_eval(names), 0, None), tensors)
    return Append(k, v, k_new, v_new, layout, *others)


@torch.library.custom_op(
    f"{NAMESPACE}::append_",
    mutates_args=("k", "v"),
    schema="(Tensor(a0!) k, Tensor(a1!) v, Tensor k_new, Tensor v_new, Tensor[] tensors, str names, Tensor? cos, "
    "Tensor? sin, bool interleaved, Tensor? q) -> Tensor",
)
def append_op(*given: Any) -> Tensor:
    """Write new keys and values as one operator. `names` are those of the layout's tensors, as text."""
    call = _call(*given)
    y = write(call, describe(*reading(call), (0, 0)))
    return call.k_new.new_empty(0) if y is None else y


@append_op.register_fake
def _(*given: Any) -> Tensor:
    call = _call(*given)
    describe_fake(*reading(call), (0, 0))
    return call.k_new.new_empty(0) if call.q is None else call.q.new_empty(call.q.shape)
