"""Run attention on Hopper (sm_90) with Gluon kernels, asynchronous and warp-specialised."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..call.backend import load
from ..call.operands import Codes, Grads, Operands, Saved
from ..call.problem import Problem, TensorSpec
from ..host.launch import on_device
from ..host.lists import make_lists
from ..host.tables import source_of_rows
from ..quantize.launch import codes_of
from ..values.tables import TileList
from . import launch, plan
from .fp32 import launch as fp32_launch
from .fp32.backward_launch import sizes_of
from .split_keys import launch as decode_launch
from .tiles import KINDS, SINGLE, current, current_fp32, padded, precision

SHORTEST = 32
"""Tokens up to which a tile of the forward at 128 is mostly empty."""


class Hopper:
    """Run attention in 16-bit types and in fp32, on tensors whose rows TMA can address."""

    name = "hopper"

    def why_not(self, problem: Problem) -> list[str]:
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

    def slower(self, problem: Problem, backward: bool) -> bool:
        """Tell whether the portable kernels are faster: their backward up to SINGLE tokens and their forward at head
        size 128 up to SHORTEST, for plain 16-bit calls (suite `short`); or their forward where it splits keys."""
        p, recipe = problem, problem.recipe
        if not backward and decode_launch.splits(p):
            return decode_launch.slower(p)
        if not backward and (p.few_rows or ("cache" in p.layout.needs and _slower_on_cache(p))):
            return True
        plain = p.dtype != torch.float32 and p.layout.uniform and not (recipe.score or recipe.dropout or p.listed)
        sizes, most = ((64, 128), SINGLE) if backward else ((128,), SHORTEST)
        return plain and padded(p) in sizes and max(p.M, p.N) <= most

    def tiles(self, problem: Problem) -> str:
        """Describe the tiles of the two main kernels, or of the one that splits keys."""
        if problem.dtype == torch.float32:
            row, name = current_fp32(problem), precision(problem)
            return f"forward {row.B_r}x{row.B_c}, 2 warpgroups; products in {name}; {source_of_rows(problem.q.device)}"
        row, back = current(problem)
        split = "gradient" if back.split_dkdv else "keys"
        splits = decode_launch.splits(problem)
        of_forward = f"{row.B_r}x{row.B_c}, {row.warpgroups} warpgroups; "
        if splits:
            of_forward = f"{decode_launch.told(problem)}; "
        rest = f"backward {back.B_r}x{back.B_c}, split by {split}; "
        if "cache" in problem.layout.needs:
            rest = "" if splits else _told_of_cache(problem)
        return f"forward {of_forward}{rest}{source_of_rows(problem.q.device)}"

    def list_tiles(self, problem: Problem, x: Operands, gradients: bool) -> tuple[TileList, ...]:
        _, planned = _launches(problem)
        back = sizes_of(problem).row if problem.dtype == torch.float32 else planned.backward
        of_backward = ((back, True),) if gradients else ()
        with on_device(x.q):
            return make_lists(problem, planned, x, ((planned.forward, False), *of_backward))

    def codes(self, problem: Problem, x: Operands) -> Codes:
        with on_device(x.q):
            return codes_of(problem, x, _launches(problem)[1].compiled)

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        of, plan_of = _forward_of(problem)
        with on_device(x.q):
            saved = of.forward(problem, plan_of(problem), x, seed)
            if plan.mixed(problem):
                portable: Any = load("triton")
                portable.write_short(problem, x, saved, plan.FULL - 1)
            return saved

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        of, planned = _launches(problem)
        with on_device(x.q):
            return of.backward(problem, planned, x, saved, do, dlse)


@lru_cache(4096)
def _forward_of(problem: Problem) -> tuple[Any, Any]:
    """Return the module that launches a problem's forward, and what plans it."""
    if decode_launch.splits(problem):
        return decode_launch, decode_launch.plan
    return (fp32_launch, fp32_launch.plan) if problem.dtype == torch.float32 else (launch, plan.plan)


def _launches(problem: Problem) -> tuple[Any, Any]:
    """Return the module that launches the kernels of a problem's type, and the problem's plan."""
    if problem.dtype == torch.float32:
        return fp32_launch, fp32_launch.plan(problem)
    return launch, plan.plan(problem)


def _slower_on_cache(p: Problem) -> bool:
    """Tell whether splitting keys is faster: for few queries, and where under a quarter of the multiprocessors have a
    tile, as it takes 4 times as long on all."""
    return p.M < plan.FULL or 4 * plan.plan(p).programs < plan.processors(p.q.device)


def _told_of_cache(p: Problem) -> str:
    """Describe programs and look-ups of a call whose keys are in a cache."""
    page, pl = p.layout.page(p), plan.plan(p)
    looked = pl.forward.B_c // pl.boxes[1].block_shape[2]
    of_pages = f"pages of {page}, {looked} look-up{'s' * (looked > 1)} a tile; " if page else ""
    short = f"sequences of fewer than {plan.FULL} queries on the portable kernel; "
    few = short if plan.mixed(p) else ""
    return f"{pl.programs} programs, keys not split; {of_pages}{few}"


def _against_cache(p: Problem) -> list[str]:
    """Return what of a cache these kernels do not read."""
    against, page = [], p.layout.page(p)
    if p.dtype == torch.float32:
        against.append("its fp32 kernels do not read caches")
    if p.k.dtype != p.dtype:
        against.append(f"it reads caches in q's type, got {str(p.k.dtype).removeprefix('torch.')}")
    if page and page % 8:
        against.append(f"pages must have a multiple of 8 rows, got {page}")
    if page and p.layout.starts is not None:
        against.append("it reads pages from their first row, not from starts")
    if p.layout.invariant:
        against.append("it does not sum keys in pieces, as invariant asks")
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
