"""The Hopper back end: Gluon kernels for sm_90, asynchronous and warp-specialised."""

import torch
from torch import Tensor

from ..problem import Grads, Operands, Problem, Saved, Spec
from ..tile.launch import on_device
from ..tile.tables import whose
from . import launch
from .tiles import current


class Hopper:
    """16-bit types whose rows TMA can address."""

    name = "hopper"

    def why_not(self, problem: Problem) -> list[str]:
        """Chip, type, head sizes, addresses, and what is left to the portable kernels."""
        p = problem
        if p.target != "sm_90":
            return [f"it is written for sm_90, the tensors are on {p.target}"]
        against = []
        if p.dtype not in (torch.float16, torch.bfloat16):
            against.append(f"it takes fp16 and bf16, not {str(p.dtype).removeprefix('torch.')}")
        if p.D % 8 or p.D_v % 8:
            against.append(f"head sizes must be multiples of 8, got {p.D} and {p.D_v}; pad them")
        if p.N < 2 or 0 in (p.B, p.M):
            against.append("it needs a query and two keys")
        for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
            if reason := _unaddressable(spec):
                against.append(f"{name} {reason}; make it contiguous")
        if p.recipe.deterministic and p.listed:
            against.append("it knows no order of a mask's listed tiles, so deterministic=True is refused with it")
        return against

    def tiles(self, problem: Problem) -> str:
        """The two main kernels' tiles."""
        row, back = current(problem)
        sides = "gradient" if back.sides else "keys"
        return (
            f"forward {row.B_r}x{row.B_c}, {row.warpgroups} warpgroups; "
            f"backward {back.B_r}x{back.B_c}, split by {sides}; {whose(problem.q.device)}"
        )

    def forward(self, problem: Problem, x: Operands, seed: Tensor | None) -> Saved:
        with on_device(x.q):
            return launch.forward(problem, launch.plan(problem), x, seed)

    def backward(self, problem: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
        with on_device(x.q):
            return launch.backward(problem, launch.plan(problem), x, saved, do, dlse)


def _unaddressable(spec: Spec) -> str | None:
    """Why TMA cannot read a tensor where it lies."""
    if not spec.aligned:
        return "does not start on a 16-byte boundary"
    if spec.stride[-1] != 1 and spec.shape[-1] != 1:
        return "has rows whose entries are not adjacent"
    for stride in spec.stride[:-1]:
        if stride * spec.dtype.itemsize % 16 or stride <= 0:
            return f"has a stride of {stride} entries, which is no positive multiple of 16 bytes"
    return None


backend = Hopper()
