"""The gradient of a sink, which is a part with one key of value 0."""

import torch
from torch import Tensor


def sink_gradient(sink: Tensor, L: Tensor, delta: Tensor) -> Tensor:
    """Sum dS = P_sink * (0 - delta) over rows: a sink (H,) is a key with value 0. L, delta: (..., H, M)."""
    dS = torch.exp(sink.to(L.dtype)[:, None] - L) * -delta
    dS = dS.masked_fill(L == -torch.inf, 0.0)  # a row without keys whose sink is -inf, or a row outside all sequences
    return dS.sum(-1).reshape(-1, sink.shape[0]).sum(0)
