"""The portable back end: Triton kernels for every GPU that Triton supports, and its interpreter on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from ..call.backend import FORWARD, Pass, Plan, holding
from ..call.operands import Grads, Operands
from ..call.problem import MAX_HEAD_SIZE, MAX_VALUE_SIZE, Problem, TensorSpec, empty_parts
from ..host.arguments import NARROW
from ..host.plan import plan_of
from ..host.repeat import repeated
from ..host.tables import source_of_rows
from . import launch, tiles
from .chunked import launch as chunked
from .plan import plan
from .single import launch as single
from .split_keys import launch as split_keys
from .tiles import NO_MATRIX_UNITS, TARGETS, WITH_FP8, current, precision, precisions

TAKES = "packed", "pages", "starts in pages", "index", "invariant", "few queries"
"""What it can do of `NEEDS` for every problem."""


class Portable:
    """It runs forward and backward of every variant, on every chip in tiles.py."""

    name = "triton"

    def takes(self, problem: Problem) -> dict[Any, str]:
        """Take 8 bits on chips that have them, and keys in a cache where kernels split keys."""
        p, sizes, wide = problem, f"{problem.D} and {problem.D_v}", max(problem.D, problem.D_v) > 256
        old, no_e4m3 = p.target in NO_MATRIX_UNITS, p.target not in (*WITH_FP8, "cpu")
        against_cache = holding(
            {
                f"it stores a cache's results in q's type, got out_dtype={p.out_dtype}": p.out_dtype != p.dtype,
                f"it reads keys in 8 bits for head sizes up to 256, got {sizes}": wide and p.k.dtype.itemsize == 1,
            }
        )
        return {
            **dict.fromkeys(TAKES, ""),
            "cache": "; ".join(against_cache),
            "8-bit keys": f"Triton converts no e4m3 on {p.target}; convert the pages to q's type" * no_e4m3,
            torch.int8: f"{p.target} multiplies no int8 in Triton; leave precision out" * old,
            torch.float8_e4m3fn: f"Triton multiplies no e4m3 on {p.target}; use precision='int8'" * no_e4m3,
        }

    def why_not(self, problem: Problem, which: Pass) -> list[str]:
        """Check device, type and precision; return the reasons against the problem."""
        p, sizes, wide = problem, f"{problem.D} and {problem.D_v}", max(problem.D, problem.D_v) > 256
        old, fp32, narrow = p.target in NO_MATRIX_UNITS, p.dtype == torch.float32, {p.D, p.D_v} & {*NARROW}
        inexact = _less_accurate(p) and not old and p.recipe.backend != self.name
        stored = f"it stores head sizes {' and '.join(map(str, NARROW))} in q's type alone, got out_dtype={p.out_dtype}"
        against = _against_target(p) + holding({
            "fp64 is for the CPU; use fp32, or move the tensors with .cpu()": p.dtype == torch.float64,
            f"{p.target} has no bf16; use fp16 or fp32": old and p.dtype == torch.bfloat16,
            f"{p.target} has too little shared memory for head sizes above 256, got {sizes}": old and wide,
            f"its fp32 kernels for head sizes above {tiles.BY_DEFAULT[4]}, got {sizes}, may round 4 times as much as "
            "PyTorch; pass backend='triton' to run them": inexact,
            stored: narrow and p.out_dtype != p.dtype,
            f"without a cache it takes head sizes up to {MAX_VALUE_SIZE}, got {sizes}; pass a layout=Cached(...)":
                p.D > MAX_VALUE_SIZE and "cache" not in p.layout.needs,
        })  # fmt: skip
        if not against and fp32 and precision(p) is None:
            where = p.target + " above head size 256" * wide
            has = ", ".join(precisions(p))
            against.append(f"precision {p.recipe.precision!r} is not available on {where}; it has {has}")
        against += p.origin.against()
        if not against and p.recipe.dropout and min(min(t.B_r, t.B_c) for t in current(p) if t) < 16:
            kind = f"head sizes {sizes} in {str(p.dtype).removeprefix('torch.')} on {p.target}"
            against.append(
                f"its tiles for {kind} have fewer than 16 rows or columns, too few for dropout; use bf16 or fp16"
            )
        return against

    def slower(self, problem: Problem, which: Pass) -> bool:
        return False

    def plan(self, problem: Problem, which: Pass) -> Plan:
        """Return how the kernels run a pass; in the interpreter on fp32, as it cannot multiply bf16."""
        found = split_keys.plan_of if which is FORWARD and splits(problem) else partial(_plan, which=which)
        return found(problem) if problem.target != "cpu" else _interpreted(problem, found, which)


def _plan(p: Problem, which: Pass) -> Plan:
    if single.fits(p, which):
        return single.pass_plan(p, which)
    return _forward(p) if which is FORWARD else _backward(p)


def _forward(p: Problem) -> Plan:
    pl = plan(p)

    def describe(p: Problem, pl: Any) -> list[str]:
        return [_tiles("forward", pl.forward), *_common(p)]

    return plan_of(p, pl, launch.forward, describe, ((pl.forward, False),), repeated)


def _backward(p: Problem) -> Plan:
    pl = plan(p)

    def describe(p: Problem, pl: Any) -> list[str]:
        found = chunked.describe(p) if pl.dkdv is None else [_tiles("dkdv", pl.dkdv), _tiles("dq", pl.dq)]
        return [*found, *_common(p)]

    lists = () if pl.dkdv is None else ((pl.dkdv, True), (pl.dq, False))
    return plan_of(p, pl, launch.backward, describe, lists, launch.repeat_backward)


def _tiles(name: str, t: tiles.Tiles) -> str:
    return f"{name} {t.B_r}x{t.B_c}, {t.in_words}"


def _common(p: Problem) -> list[str]:
    """Say what holds for both passes."""
    products = [f"products in {precision(p) if p.target != 'cpu' else 'fp32'}"] if p.dtype == torch.float32 else []
    rounds = ["may round 4 times as much as PyTorch"] if _less_accurate(p) else []
    return [*products, *rounds, source_of_rows(p.q.device)]


def _interpreted(p: Problem, plan_of: Callable[[Problem], Plan], which: Pass) -> Plan:
    """Return how a pass runs in the interpreter: on fp32, with results in the types asked for."""

    def run(x: Operands, *given: Any) -> Any:
        wide, wide_x = _widened(p, x)
        if which is FORWARD:
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
    return p.splits_keys and ("cache" in p.layout.needs or p.target not in NO_MATRIX_UNITS)


def _less_accurate(p: Problem) -> bool:
    """Tell whether some results of a problem's head sizes and type broke the rule of accuracy on a GPU."""
    return p.target != "cpu" and max(p.D, p.D_v) > tiles.BY_DEFAULT.get(p.dtype.itemsize, MAX_HEAD_SIZE)


def _widened(p: Problem, x: Operands) -> tuple[Problem, Operands]:
    """Convert a call to fp32, as the interpreter cannot multiply bf16. What becomes codes keeps its type, to which
    rotary rounds."""
    q, k, v = (t.float() if kind is None else t for t, kind in zip(x[:3], p.products.code_types, strict=True))
    specs = [TensorSpec.of(t)._replace(dtype=torch.float32) for t in (q, k, v)]
    wide = p._replace(recipe=p.recipe._replace(out_dtype=None), q=specs[0], k=specs[1], v=specs[2])
    return wide, Operands(q, k, v, x.extra)


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
