"""Masks and scores as kernel arguments: their device functions, and what these captured."""

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..call.problem import Problem, once
from ..program import Aligned
from ..program.arithmetic import Bounds
from ..program.program import Builder, decode, literal, operands
from ..tile import masks, scores
from ..tile.rows import Packed
from ..values.listed import TileList
from .arguments import lengths, odd, packed_by
from .emit import arguments, functions, is_finite, needs_shift
from .statements import Form

MOST = 2**31
STICKS_OUT = 256
"""The most rows or keys of a tile that lie outside."""


def device_values(p: Problem, extra: tuple[Tensor, ...], own: Any = None) -> tuple[Any, Any, Tensor | None]:
    """Return the mask's parts and the scores as kernel arguments, and the sink; once if they hold no tensor.

    `own` is a back end's module of functions for scores: `saturated`, and what else emit.py and statements.py name.
    """
    return _device_values(p, extra, own) if extra else _plain_values(p, own)


@once
def _plain_values(p: Problem, own: Any) -> tuple[Any, Any, None]:
    return _device_values(p, (), own)


def _device_values(p: Problem, extra: tuple[Tensor, ...], own: Any) -> tuple[Any, Any, Any]:
    mask, score, sink = p.values(extra)
    where = packed_by(p, extra)
    parts = tuple([_mask_part(p, part, where) for part in mask if not isinstance(part, TileList)])
    changes = tuple([_score_part(p, change, 1.0 if n else p.scale, own, where) for n, change in enumerate(score)])
    return parts, changes, None if sink is None else sink.contiguous()


def _mask_part(p: Problem, mask: Any, where: Packed | None) -> masks.Part:
    if mask.device and where is None:
        keep, keys, queries = (getattr(masks, f"{mask.device}_{name}") for name in ("keep", "keys", "queries"))
        return masks.Part(keep, keys, queries, mask.arguments(p))
    traced = mask.traced
    form = form_of(p, traced, where)
    made = functions(traced.program.text, form)
    keys, queries = (made.get(name, masks.everywhere) for name in ("keys", "queries"))
    return masks.Part(made["keep"], keys, queries, captured(p, traced, form, where))


def _score_part(p: Problem, score: Any, unit: float, own: Any, where: Packed | None) -> scores.Part:
    traced = score.traced
    form = form_of(p, traced, where, p.past)._replace(steps=getattr(own, "STEPS", False))
    made = functions(traced.program.text, form, getattr(own, "saturated", None))
    return scores.Part(made["fn"], made["grad"], unit, captured(p, traced, form, where))


def captured(p: Problem, traced: Aligned, form: Form, where: Packed | None) -> tuple[Any, ...]:
    """Return what the device functions of a program captured; `where`: the sequences, if they are packed."""
    shift: Any = (p.N - p.M,) if where is None else where[:2]
    end: Any = p.N if where is None else where.cu_k
    place = (*(shift if needs_shift(traced.program, form) else ()), *([end] if form.end else []))
    return arguments(traced.program.text, traced.tensors, traced.numbers, place)


def form_of(p: Problem, traced: Aligned, where: Packed | None, past: bool = False) -> Form:
    """Return what device functions of a program may rely on in a problem.

    past: whether the mask hides later keys, which says something of scores alone.
    """
    program, tensors, numbers, rows = traced
    greatest = p.B - 1, p.H - 1, max(p.M, p.N) + STICKS_OUT, p.N + STICKS_OUT
    narrow = all([_last(t) < MOST for t in tensors])
    of_mask = program.kinds[program.outputs[0]] == "b"
    finite = of_mask or is_finite(program.text, tuple([x == 0 for x in numbers]))
    end = "" if finite else "N" if where is None else "keys"
    return Form(rows, past and rows == "last", narrow, exceeds(program.text, *greatest), where is not None, end)


def _last(t: Any) -> int:
    """Return the offset of a tensor's last entry."""
    return sum([(n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)])


@lru_cache(1024)
def exceeds(text: str, b: int, h: int, i: int, j: int) -> bool:
    """Tell whether a whole number that a program computes from indices may need more than 32 bits; b to j are the
    greatest ones."""
    build, program = Builder(), decode(text)
    inputs: Any = {"b": (0, b), "h": (0, h), "i": (-i, i), "j": (0, j)}
    found = Bounds(program, build, inputs, static=True).found
    known: list[bool] = []
    for n, node in enumerate(program.nodes):
        read = node[0] == "in" and node[1] not in inputs
        known.append(not read and node[0] not in ("load", "cast") and all([known[x] for x in operands(node)]))
        if known[n] and program.kinds[n] == "i":
            ends = [literal(build.nodes[end.n]) for end in found[n] if end is not None]
            if any([end is not None and abs(end) >= MOST for end in ends]):
                return True
    return False


def with_lse_shift(p: Problem, changes: tuple[Any, ...], lse: Tensor, extra: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the scores of a backward. With a bias, whose logits may be large, add one that subtracts lse."""
    if not p.biased:
        return changes
    fn: Any = scores.minus_lse_fn
    grad: Any = scores.minus_lse_grad
    captured = lse, *map(odd, (p.H, *lengths(p))), *(packed_by(p, extra) or ())
    return (*changes, scores.Part(fn, grad, 1.0, captured))
