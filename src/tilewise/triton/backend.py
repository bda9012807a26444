"""The portable back end: Triton kernels for every GPU that Triton supports, and its interpreter on the CPU."""

from collections.abc import Callable
from typing import Any

import torch
import triton

from ..call.backend import FORWARD, NEEDS, Pass, Plan
from ..call.operands import Grads, Operands
from ..call.problem import MAX_HEAD_SIZE, Problem, TensorSpec, empty_parts
from ..host.arguments import NARROW
from ..host.plan import plan_of
from ..host.tables import source_of_rows
from . import launch, tiles
from .plan import plan
from .split_keys import launch as split_keys
from .tiles import NO_MATRIX_UNITS, TARGETS, WITH_FP8, current, precision, precisions


class Portable:
    """It runs forward and backward of every variant, on every chip in tiles.py."""

    name = "triton"
    takes = frozenset(NEEDS)

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Check device, type and precision; return the reasons against the problem."""
        against, sizes = _against_target(problem) + problem.products.against(problem), f"{problem.D} and {problem.D_v}"
        if problem.products.codes:
            against += _against_codes(problem)
        if problem.dtype == torch.float64:
            against.append("fp64 is for the CPU; use fp32, or move the tensors with .cpu()")
        if problem.dtype == torch.bfloat16 and problem.target in NO_MATRIX_UNITS:
            against.append(f"{problem.target} has no bf16; use fp16 or fp32")
        if max(problem.D, problem.D_v) > 256 and problem.target in NO_MATRIX_UNITS:
            against.append(f"{problem.target} has too little shared memory for head sizes above 256, got {sizes}")
        elif _less_accurate(problem) and problem.recipe.backend != self.name:
            against.append(
                f"its fp32 kernels for head sizes above {tiles.BY_DEFAULT[4]}, got {sizes}, may round 4 times "
                "as much as PyTorch; pass backend='triton' to run them"
            )
        if "cache" in problem.layout.needs:
            against += _against_cache(problem)
        if problem.k.dtype.itemsize == 1 and problem.target not in (*WITH_FP8, "cpu"):
            against.append(f"Triton converts no e4m3 on {problem.target}; convert the pages to q's type")
        if problem.out_dtype != problem.dtype and {problem.D, problem.D_v} & {*NARROW}:
            sizes_of_rows = " and ".join(map(str, NARROW))
            against.append(f"it stores head sizes {sizes_of_rows} in q's type alone, got out_dtype={problem.out_dtype}")
        if not against and problem.dtype == torch.float32 and precision(problem) is None:
            where = problem.target + " above head size 256" * (max(problem.D, problem.D_v) > 256)
            has = ", ".join(precisions(problem))
            against.append(f"precision {problem.recipe.precision!r} is not available on {where}; it has {has}")
        against += problem.origin.against()
        if not against and problem.recipe.dropout and min(min(t.B_r, t.B_c) for t in current(problem)) < 16:
            kind = f"head sizes {sizes} in {str(problem.dtype).removeprefix('torch.')} on {problem.target}"
            against.append(
                f"its tiles for {kind} have fewer than 16 rows or columns, too few for dropout; use bf16 or fp16"
            )
        return against

    def slower(self, problem: Problem, which: Pass) -> bool:
        return False

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how the kernels run a pass; in the interpreter on fp32, as it cannot multiply bf16."""
        found = _backward if which is not FORWARD else split_keys.plan_of if splits(problem) else _forward
        return found(problem) if problem.target != "cpu" else _interpreted(problem, found)


def _forward(p: Problem) -> Plan:
    pl = plan(p)
    return plan_of(p, pl, launch.forward, _describe_forward, ((pl.forward, False),), launch.repeated)


def _backward(p: Problem) -> Plan:
    pl = plan(p)
    return plan_of(p, pl, launch.backward, _describe_backward, ((pl.dkdv, True), (pl.dq, False)))


def _describe_forward(p: Problem, pl: Any) -> list[str]:
    return [_tiles("forward", pl.forward), *_common(p)]


def _describe_backward(p: Problem, pl: Any) -> list[str]:
    return [_tiles("dkdv", pl.dkdv), _tiles("dq", pl.dq), *_common(p)]


def _tiles(name: str, t: tiles.Tiles) -> str:
    return f"{name} {t.B_r}x{t.B_c}, {t.warps} warps, {t.stages} stage{'s' * (t.stages > 1)}"


def _common(p: Problem) -> list[str]:
    """Say what holds for both passes."""
    products = [f"products in {precision(p) if p.target != 'cpu' else 'fp32'}"] if p.dtype == torch.float32 else []
    rounds = ["may round 4 times as much as PyTorch"] if _less_accurate(p) else []
    return [*products, *rounds, source_of_rows(p.q.device)]


def _interpreted(p: Problem, plan_of: Callable[[Problem], Plan]) -> Plan:
    """Return how a pass runs in the interpreter: on fp32, with results in the types asked for."""

    def run(x: Operands, *given: Any) -> Any:
        wide, wide_x = _widened(p, x)
        if plan_of is not _backward:
            saved = plan_of(wide).run(wide_x, *given)
            return saved._replace(o=saved.o.to(p.out_dtype))
        saved, do, dlse = given
        saved, do = saved._replace(o=saved.o.float()), None if do is None else do.float()
        grads = plan_of(wide).run(wide_x, saved, do, dlse)
        dq, dk, dv = (part.copy_(g) for part, g in zip(empty_parts(p, x), grads[:3], strict=True))
        return Grads(dq, dk, dv, grads.extra)

    return Plan(run, plan_of(p).describe, lambda x: plan_of(_widened(p, x)[0]).lists(x))


def splits(p: Problem) -> bool:
    """Tell whether the kernels that split keys run a problem's forward."""
    return "cache" in p.layout.needs or (p.few_rows and p.target not in NO_MATRIX_UNITS)


def _less_accurate(p: Problem) -> bool:
    """Tell whether some results of a problem's head sizes and type broke the rule of accuracy on a GPU."""
    return p.target != "cpu" and max(p.D, p.D_v) > tiles.BY_DEFAULT.get(p.dtype.itemsize, MAX_HEAD_SIZE)


def _widened(p: Problem, x: Operands) -> tuple[Problem, Operands]:
    """Convert a call to fp32, as the interpreter cannot multiply bf16. 16-bit types use the path for matrix units. What
    becomes codes keeps its type, to which rotary rounds."""
    if p.products.scales:  # its only products are those of e4m3
        return p, x
    q, k, v = (t.float() for t in x[:3])
    recipe = p.recipe._replace(out_dtype=None)
    if not p.products.codes and p.dtype != torch.float32:
        recipe = recipe.exact("tf32x3")
    wide = p._replace(q=TensorSpec.of(q), k=TensorSpec.of(k), v=TensorSpec.of(v), recipe=recipe)
    return wide, Operands(*(x[:2] if p.products.codes else (q, k)), v, x.extra)


def _against_cache(problem: Problem) -> list[str]:
    against = []
    if max(problem.D, problem.D_v) > 256:
        against.append(f"it splits keys for head sizes up to 256, got {problem.D} and {problem.D_v}")
    if problem.out_dtype != problem.dtype:
        against.append(f"it stores a cache's results in q's type, got out_dtype={problem.out_dtype}")
    return against


def _against_codes(problem: Problem) -> list[str]:
    against = []
    if problem.products.codes_of_v and problem.target not in (*WITH_FP8, "cpu"):
        against.append(f"Triton multiplies no e4m3 on {problem.target}; use precision='int8'")
    if problem.target in NO_MATRIX_UNITS:
        against.append(f"{problem.target} multiplies no int8 in Triton; leave precision out")
    return against


def _against_target(problem: Problem) -> list[str]:
    if problem.target == "cpu":
        if not triton.knobs.runtime.interpret:  # type: ignore[attr-defined]
            return [
                "CPU tensors run here only in Triton's interpreter; set TRITON_INTERPRET=1, or move them with .cuda()"
            ]
        if problem.recipe.backend != "triton":
            return ["the interpreter is slow, so it runs only when asked for with backend='triton'"]
        return []
    if problem.target not in TARGETS:
        return [f"{problem.target} is not a chip that Triton reaches; it takes {', '.join(TARGETS)}"]
    return []


backend = Portable()
