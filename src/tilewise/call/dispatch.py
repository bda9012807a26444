"""What every operation asks PyTorch's dispatcher: who sees a call, and what has no derivative."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

NO_FORWARD_MODE = "tilewise has no forward-mode derivative (jvp, forward_ad); use reverse mode (backward, grad, vjp)"
PLAIN = {Tensor, torch.nn.Parameter}
"""Classes whose memory a back end may read directly; another subclass may store its data anywhere."""
CHECK = os.environ.get("TILEWISE_CHECK") == "1"
NAMESPACE = str(__package__).rpartition(".")[0].replace(".", "_")
"""Of the operators: the package's name, so that copies of it under other names can share a process."""
OPERATORS = getattr(torch.ops, NAMESPACE)
BY_RANK: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {}
"""Who computes calls with a class of tensors of which each rank holds a part: `parallel/dtensor.py`, of DTensors."""


def intercepted(tensors: Sequence[Tensor]) -> bool:
    """Tell whether the compiler, a dispatch mode or a tensor subclass needs to see operators.

    This is also true if torch's dispatcher must negate a view such as `z.conj().imag`.
    """
    return (
        torch.compiler.is_compiling()
        or not PLAIN.issuperset(map(type, tensors))
        or tensors[0].is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or any([t.is_neg() for t in tensors])
    )


def transformed() -> bool:
    """Tell whether one of torch.func's transforms is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def differentiated() -> bool:
    """Tell whether one of torch.func's transforms takes a gradient."""
    levels = torch._C._functorch.get_interpreter_stack() or ()  # type: ignore[attr-defined]
    return any([level.key() == torch._C._functorch.TransformType.Grad for level in levels])  # type: ignore[attr-defined]


differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: while a graph is traced, its transforms are active."""


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise RuntimeError under forward-mode AD. Without it, register_autograd would silently return zeros."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(NO_FORWARD_MODE)


class ReverseMode(torch.autograd.Function):
    """An autograd.Function whose forward-mode derivative raises that RuntimeError."""

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        raise RuntimeError(NO_FORWARD_MODE)


def refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    """Raise RuntimeError, as the derivative of a gradient."""
    raise RuntimeError(
        "tilewise has no double backward: the gradients of attention cannot be differentiated again; "
        "use torch's math attention (SDPBackend.MATH) where second derivatives are needed"
    )


def pick(args: Any, dims: Any, index: int) -> Any:
    """Return the arguments at one index of the mapped dimension, given by `dims`; None means not mapped."""
    if isinstance(dims, (list, tuple)):
        return [pick(a, d, index) for a, d in zip(args, dims, strict=True)]
    return args if dims is None else args.select(dims, index)
