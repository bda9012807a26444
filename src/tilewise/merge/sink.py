"""The gradient of a sink, which is a part with one key of value 0."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..call.operands import Grads, Operands
from ..call.problem import Problem


def sink_gradient(sink: Tensor, L: Tensor, delta: Tensor) -> Tensor:
    """Sum dS = P_sink * (0 - delta) over rows: a sink (H,) is a key with value 0. L, delta: (..., H, M)."""
    dS = torch.exp(sink.to(L.dtype)[:, None] - L) * -delta
    dS = dS.masked_fill(L == -torch.inf, 0.0)  # a row without keys whose sink is -inf, or a row outside all sequences
    return dS.sum(-1).reshape(-1, sink.shape[0]).sum(0)


def with_sink(p: Problem, x: Operands, lse: Tensor, grads: Grads, delta: Callable[[], Tensor]) -> Grads:
    """Return the gradients with that of the sink, if it is wanted. `delta` is called for delta in the layout of lse."""
    at = p.sink_at
    if not p.recipe.sink or grads.extra[at] is None or p.recipe.backend:  # the back end named has a kernel for it
        return grads
    found = sink_gradient(x.extra[at], lse, delta()).to(x.extra[at].dtype)
    return grads._replace(extra=(*grads.extra[:at], found, *grads.extra[at + 1 :]))
