"""Run attention on Hopper (sm_90) with Gluon kernels, asynchronous and warp-specialised."""

from typing import Any

import torch

from ..call.backend import FORWARD, Pass, Plan
from ..call.problem import Problem, TensorSpec
from . import launch, plan
from .fp32 import launch as fp32_launch
from .split_keys import launch as split_keys
from .tiles import KINDS, SINGLE, padded, precision

SHORTEST = 32
"""Tokens up to which a tile of the forward at 128 is mostly empty."""


class Hopper:
    """Run attention in 16-bit types and in fp32, on tensors whose rows TMA can address."""

    name = "hopper"
    takes = frozenset({"packed", "cache", "pages", "index"})

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Return why these kernels cannot run a problem: its chip, type, head sizes, addresses, or an option left to
        the portable kernels."""
        p = problem
        if p.target != "sm_90":
            return [f"it is written for sm_90, the tensors are on {p.target}"]
        against = []
        if "cache" in p.layout.needs:
            against += _against_cache(p)
        if p.dtype == torch.float32:
            against += _against_fp32(p)
        elif p.dtype not in (torch.float16, torch.bfloat16):
            against.append(f"it takes fp16, bf16 and fp32, not {str(p.dtype).removeprefix('torch.')}")
        elif max(p.D, p.D_v) > 256:
            against.append(f"it takes head sizes up to 256, got {p.D} and {p.D_v}; backend='triton' takes them to 512")
        against += p.products.against(p)
        if p.D % 8 or p.D_v % 8:
            against.append(f"head sizes must be multiples of 8, got {p.D} and {p.D_v}; pad them")
        if p.N < 2 or 0 in (p.B, p.M):
            against.append("it needs a query and two keys")
        for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
            if name not in p.products.scaled and (reason := _unaddressable(spec)):
                against.append(f"{name} {reason}; make it contiguous")
        against += p.origin.against()
        if p.recipe.deterministic and p.listed:
            against.append("it knows no order of a mask's listed tiles, so deterministic=True is refused with it")
        return against

    def slower(self, problem: Problem, which: Pass) -> bool:
        """Tell whether the portable kernels are faster: their backward up to SINGLE tokens and their forward at head
        size 128 up to SHORTEST, for plain 16-bit calls (suite `short`); or their forward where it splits keys."""
        p, recipe = problem, problem.recipe
        if which is FORWARD and split_keys.splits(p):
            return split_keys.slower(p)
        if which is FORWARD and (p.few_rows or ("cache" in p.layout.needs and _slower_on_cache(p))):
            return True
        plain = p.dtype != torch.float32 and p.layout.uniform and not (recipe.score or recipe.dropout or p.listed)
        sizes, most = ((128,), SHORTEST) if which is FORWARD else ((64, 128), SINGLE)
        return plain and padded(p) in sizes and max(p.M, p.N) <= most

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how the kernels run a pass: of fp32, with split keys, or of 16 bits."""
        if which is FORWARD and split_keys.splits(problem):
            return split_keys.plan_of(problem)
        of: Any = fp32_launch if problem.dtype == torch.float32 else launch
        return (of.forward_plan if which is FORWARD else of.backward_plan)(problem)


def _slower_on_cache(p: Problem) -> bool:
    """Tell whether splitting keys is faster: for few queries, and where under a quarter of the multiprocessors have a
    tile, as it takes 4 times as long on all."""
    return p.M < plan.FULL or 4 * plan.plan(p).programs < plan.processors(p.q.device)


def _against_cache(p: Problem) -> list[str]:
    """Return what of a cache these kernels do not read."""
    against, page = [], p.layout.page(p)
    if p.dtype == torch.float32:
        against.append("its fp32 kernels do not read caches")
    if p.k.dtype != p.dtype:
        against.append(f"it reads caches in q's type, got {str(p.k.dtype).removeprefix('torch.')}")
    if page and page % 8:
        against.append(f"pages must have a multiple of 8 rows, got {page}")
    if p.layout.most is not None:
        against.append("it leaves sequences of few queries to the portable kernels")
    return against


def _against_fp32(p: Problem) -> list[str]:
    """Return why the fp32 kernels leave a problem to the portable ones."""
    against = []
    if precision(p) is None:
        has = " and ".join(KINDS)
        against.append(f"it multiplies fp32 in {has}, not in {p.recipe.precision}")
    if max(p.D, p.D_v) > 128:
        against.append(f"its fp32 kernels take head sizes up to 128, got {p.D} and {p.D_v}")
    if p.recipe.score or p.recipe.dropout:
        against.append("its fp32 kernels know no scores and no dropout")
    return against


def _unaddressable(spec: TensorSpec) -> str | None:
    """Return why TMA cannot read a tensor where it lies, or None if it can."""
    if not spec.aligned:
        return "does not start on a 16-byte boundary"
    if spec.stride[-1] != 1 and spec.shape[-1] != 1:
        return "has rows whose entries are not adjacent"
    for stride in spec.stride[:-1]:
        if stride * spec.dtype.itemsize % 16 or stride <= 0:
            return f"has a stride of {stride} entries, which is no positive multiple of 16 bytes"
    return None


backend = Hopper()
