"""Problems as calls make them, without a GPU."""

import torch

from tilewise.attention.api import attention
from tilewise.attention.explain import problem_on
from tilewise.call.check import check_arguments
from tilewise.call.operands import Operands
from tilewise.call.problem import Problem


def call(
    M, N, D, H=4, H_k=4, dtype=torch.bfloat16, batch=(2,), keys=None, D_v=None, within=False, **given
) -> tuple[Problem, Operands]:
    """The problem of a call on an H200, and its tensors; packed sequences are no `batch`, (). A cache has `keys`. With
    `within`, values are in k's memory."""
    q, k = (torch.empty(*rows, heads, D, dtype=dtype) for rows, heads in (((*batch, M), H), (keys or (*batch, N), H_k)))
    options = {**attention.__kwdefaults__, **given}
    del options["seed"], options["return_lse"]
    v = k if D_v is None else k[..., :D_v] if within else k.new_empty(*k.shape[:-1], D_v)
    x, *rest = check_arguments(q, k, v, **options)
    return problem_on(x, *rest, "sm_90"), x


def problem(*sizes, **given) -> Problem:
    """The problem alone."""
    return call(*sizes, **given)[0]
