"""Problems as calls make them, without a GPU."""

import torch

from tilewise.api import _gather, _hypothetical, attention
from tilewise.problem import Problem


def problem(M, N, D, H=4, H_k=4, dtype=torch.bfloat16, **given) -> Problem:
    """That of a call with a batch of two on an H200."""
    q, k = (torch.empty(2, length, heads, D, dtype=dtype) for length, heads in ((M, H), (N, H_k)))
    options = {**attention.__kwdefaults__, **given}
    del options["seed"], options["return_lse"]
    return _hypothetical(*_gather(q, k, k, **options), "sm_90")
