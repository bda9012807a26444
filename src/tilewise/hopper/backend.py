"""Run attention on Hopper (sm_90) with Gluon kernels, asynchronous and warp-specialised."""

from typing import Any

import torch

from ..call.backend import BACKWARD, FORWARD, Pass, Plan, holding, import_kernels, planned
from ..call.problem import Problem, TensorSpec
from . import launch, plan
from .counts import processors
from .split_keys.choice import few_keys, splits
from .tiles import KINDS, SINGLE, padded, precision

SHORTEST = 32
"""Tokens up to which a tile of the forward at 128 is mostly empty."""


class Hopper:
    """Run attention in 16-bit types and in fp32, on tensors whose rows TMA can address."""

    name = "hopper"

    def takes(self, problem: Problem) -> dict[Any, str]:
        """Take codes and packed sequences, and in 16 bits caches; leave some of these to the portable kernels."""
        return {
            "packed": "", "pages": "", "index": "", torch.int8: "", torch.float8_e4m3fn: "",
            "cache": "its fp32 kernels do not read caches" * (problem.dtype == torch.float32),
            "8-bit keys": f"it reads caches in q's type, got {_name(problem.k.dtype)}",
            "few queries": "it leaves sequences of few queries to the portable kernels",
        }  # fmt: skip

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Return why these kernels cannot run a problem: its chip, type, head sizes, addresses, or an option left to
        the portable kernels."""
        p, recipe = problem, problem.recipe
        if p.target != "sm_90":
            return [f"it is written for sm_90, the tensors are on {p.target}"]
        fp32, largest, sizes = p.dtype == torch.float32, max(p.D, p.D_v), f"got {p.D} and {p.D_v}"
        page, unordered = p.layout.page(p) or 0, recipe.deterministic and p.listed and padded(p) <= 128
        wide = not fp32 and largest > 256 and not (splits(p) or _wide(p))
        against = {
            f"pages must have a multiple of 8 rows, got {page}": page % 8,
            f"it multiplies fp32 in {' and '.join(KINDS)}, not in {recipe.precision}": fp32 and precision(p) is None,
            f"its fp32 kernels take head sizes up to 128, {sizes}": fp32 and largest > 128,
            "its fp32 kernels know no scores and no dropout": fp32 and (recipe.score or recipe.dropout),
            f"it takes fp16, bf16 and fp32, not {_name(p.dtype)}": p.dtype == torch.float64,
            f"it takes head sizes up to 256, {sizes}; backend='triton' takes larger ones": wide,
            f"head sizes must be multiples of 8, {sizes}; pad them": p.D % 8 or p.D_v % 8,
            "it leaves packed sequences with a bias to the portable kernels": p.biased and not p.layout.uniform,
            "it needs a query and two keys": p.N < 2 or 0 in (p.B, p.M),
            "it knows no order of a mask's listed tiles, so deterministic=True is refused with it": unordered,
        }
        read = {"q": p.q, "k": p.k, "v": p.v}
        for name in p.products.scaled:  # a copy is read
            del read[name]
        why = [f"{name} {reason}; make it contiguous" for name, spec in read.items() for reason in _unaddressable(spec)]
        return [*holding(against), *why, *p.origin.against()]

    def slower(self, problem: Problem, which: Pass) -> bool:
        """Tell whether the portable kernels are faster: with scores up to SINGLE tokens; for plain 16-bit calls (suite
        `short`) their backward up to SINGLE and their forward at head size 128 up to SHORTEST; or their forward where
        it splits keys."""
        p, recipe = problem, problem.recipe
        if which is FORWARD and splits(p):
            return few_keys(p)
        if which is FORWARD and p.splits_keys and _leaves_idle(p):
            return True
        if p.dtype == torch.float32 or not p.layout.uniform or max(p.M, p.N) > SINGLE or padded(p) > 128:
            return False
        plain = not (recipe.score or recipe.dropout or p.listed)
        if which is FORWARD and plain:
            return padded(p) == 128 and max(p.M, p.N) <= SHORTEST
        return plain or bool(recipe.score)

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how the kernels run a pass: of fp32 or with split keys, imported here, or of 16 bits. The portable
        kernels run the backward above head size 256."""
        if which is BACKWARD and _wide(problem):
            return planned(problem._replace(recipe=problem.recipe._replace(backend="triton")), which)
        if which is FORWARD and splits(problem):
            return import_kernels("hopper.split_keys.launch").plan_of(problem)
        of: Any = import_kernels("hopper.fp32.launch") if problem.dtype == torch.float32 else launch
        return (of.forward_plan if which is FORWARD else of.backward_plan)(problem)


def _leaves_idle(p: Problem) -> bool:
    """Tell whether splitting keys is faster: for few queries, and where under a quarter of the multiprocessors have a
    tile, as it takes 4 times as long on all."""
    return p.M < plan.FULL or 4 * plan.plan(p).programs < processors(p.q.device)


def _wide(p: Problem) -> bool:
    """Tell whether only the forward takes a problem's head sizes."""
    return p.needs <= {"packed"} and not p.recipe.dropout and 256 < max(p.D, p.D_v) <= 512


def _unaddressable(spec: TensorSpec) -> list[str]:
    """Return the first reason why TMA cannot read a tensor where it lies, if there is one."""
    odd = [stride for stride in spec.stride[:-1] if stride <= 0 or stride * spec.dtype.itemsize % 16]
    reasons = {
        "does not start on a 16-byte boundary": not spec.aligned,
        "has rows whose entries are not adjacent": spec.stride[-1] != 1 and spec.shape[-1] != 1,
        f"has a stride of {next(iter(odd), 0)} entries, which is no positive multiple of 16 bytes": odd,
    }
    return holding(reasons)[:1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


backend = Hopper()
