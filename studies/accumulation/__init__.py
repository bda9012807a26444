"""Does it pay to accumulate in fp16? Attention that does (docs/results/accumulation.md).

from studies.accumulation import Accumulate, attention

o = attention(q, k, v, accumulate="fp16")
o = attention(q, k, v, accumulate=Accumulate(values="fp16", stability=True))
"""

import torch
from torch import Tensor

from tilewise.attention.api import DEFAULTS, FULL
from tilewise.call.backend import check_triton, needs
from tilewise.call.check import check_arguments, describe
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.values.masks import Mask
from tilewise.values.value import Unsupported

from . import rounded
from .accumulate import LARGEST, Accumulate

__all__ = ["LARGEST", "Accumulate", "attention"]

BACKENDS = ("triton", "cpu")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = FULL,
    scale: float | None = None,
    accumulate: str | Accumulate = "fp16",
    backend: str | None = None,
) -> Tensor:
    """softmax(scale * Q K^T) V with a choice of accumulators. Forward only.

    Args:
        q: (B, M, H, D), fp16, any strides.
        k: (B, N, H_k, D), H a multiple of H_k.
        v: (B, N, H_k, D_v). Head sizes from 1 to 256.
        mask: a Mask; `&` composes. A row that sees no key gives o = 0.
        scale: what the logits are multiplied by, >= 0; default D ** -0.5.
        accumulate: "fp16" or "fp32" for both products, or an Accumulate.
        backend: None chooses "triton" for GPUs and "cpu" for CPU tensors. "cpu" computes in fp32 and rounds where a
            matrix unit with fp16 accumulators would: every 16 terms. Triton's interpreter, where "triton" takes CPU
            tensors, rounds the product of two tiles once, and its sum with the older ones again.

    Returns:
        o (B, M, H, D_v), fp16, contiguous. What overflows is inf or NaN.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, what it got and what is allowed.
        Unsupported: the chip has no such accumulators, or the back end does not take the tensors.
        RuntimeError: an input wants a gradient.
    """
    if isinstance(accumulate, str):
        accumulate = Accumulate(scores=accumulate, values=accumulate)
    if not isinstance(accumulate, Accumulate):
        raise TypeError(f"accumulate must be 'fp16', 'fp32' or an Accumulate, got {accumulate!r}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    options = {**DEFAULTS, "mask": mask, "scale": scale}
    x, recipe, longest = check_arguments(
        q, k, v, **{n: o for n, o in options.items() if n not in ("seed", "return_lse")}
    )
    if torch.is_grad_enabled() and any(t.requires_grad for t in x[:3]):
        raise RuntimeError(
            "experimental.attention has no gradient; call it under torch.no_grad(), or use tilewise.attention"
        )
    if x.q.dtype != torch.float16:
        raise TypeError(f"q, k and v must be fp16, got {x.q.dtype}; convert them with .half()")
    return attend(describe(x, recipe, longest), x, accumulate, backend)


def attend(p: Problem, x: Operands, accumulate: Accumulate, backend: str | None = None) -> Tensor:
    """Return o of a checked problem."""
    chosen = backend or ("cpu" if p.target == "cpu" else "triton")
    if chosen == "cpu":
        if p.target != "cpu":
            raise Unsupported(
                f"the tensors are on {p.target}, and backend 'cpu' takes CPU tensors; move them with .cpu()"
            )
        return rounded.forward(p, x, accumulate)
    try:
        check_triton()
        from . import launch
    except ImportError as error:
        raise Unsupported(f"backend 'triton': {needs(error)}") from error
    if reasons := launch.why_not(p, accumulate):
        raise Unsupported("; ".join(reasons))
    return launch.forward(p, x, accumulate)
