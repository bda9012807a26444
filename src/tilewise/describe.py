"""Validation: turn the tensors of a call into a checked Problem. Errors name the argument, its value and the remedy."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import mask as masks
from . import score as scores
from .mask import Value
from .problem import (
    FLOATING_TYPES,
    KINDS,
    MAX_HEAD_SIZE,
    Operands,
    Problem,
    Recipe,
    Spec,
    Unsupported,
    matmul_setting,
    target_of,
)

TRANSPOSE = (
    "did you mean q.transpose(1, 2), and so k and v? Shapes are (batch, length, heads, head size); those of torch's "
    "scaled_dot_product_attention have the heads before the length"
)
"""The remedy where q, k and v with the heads first would fit."""


def describe(x: Operands, recipe: Recipe, longest: tuple[int, int], wanted: tuple[bool, ...] = ()) -> Problem:
    """Return the checked Problem of a call with real tensors. `longest`: (max_q, max_k), used for packed sequences."""
    matmul = matmul_setting() if x.q.dtype == torch.float32 and not recipe.precision else None
    seen = [(t.shape, t.dtype, t.device, t.stride(), t.data_ptr() % 16 == 0) for t in (x.q, x.k, x.v, *x.extra)]
    return _described(recipe, tuple(seen), longest, matmul, wanted)


@lru_cache(4096)
def _described(
    recipe: Recipe, seen: tuple[Any, ...], longest: tuple[int, int], matmul: str | None, wanted: tuple[bool, ...]
) -> Problem:
    """Build the Problem from plain tuples, which are cheaper to make and hash in every call than Specs."""
    q, k, v, *extra = (Spec(tuple(shape), *rest) for shape, *rest in seen)
    problem = checked(Problem(recipe, q, k, v, tuple(extra), *longest, target_of(q.device), matmul, wanted))
    _check_lengths(problem)
    return problem


def describe_fake(x: Operands, recipe: Recipe, longest: tuple[int, int], target: str = "meta") -> Problem:
    """Return the checked Problem for fake or meta tensors. Sizes may be symbolic, so nothing is hashed."""
    extra = tuple(Spec.of(t, real=False) for t in x.extra)
    q, k, v = (Spec.of(t, real=False) for t in x[:3])
    return checked(Problem(recipe, q, k, v, extra, *longest, target, None))


def checked(p: Problem) -> Problem:
    """Return the problem if shapes, types and devices fit; else raise a TypeError or ValueError with the remedy."""
    _check_operands(p)
    _check_recipe(p)
    _check_extra(p)
    return p


def check_values(values: Sequence[Value]) -> None:
    """Raise TypeError for a mask or score that no back end knows, such as a subclass of one of ours."""
    for value in values:
        if KINDS.get(type(value).__name__) is not type(value):
            raise TypeError(
                f"mask and score must be of classes that the back ends know, got {type(value).__name__}; use Dense or "
                "Bias for one of your own, or add it as CONTRIBUTING.md shows"
            )


def _check_operands(p: Problem) -> None:
    rank, shape = (3, "(T, heads, head size)") if p.recipe.varlen else (4, "(batch, length, heads, head size)")
    for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
        if len(spec.shape) != rank:
            hint = "pass layout=Varlen(...) for packed sequences" if len(spec.shape) == 3 else "reshape it"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(spec.shape)}; {hint}")
        if spec.dtype not in FLOATING_TYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {spec.dtype}; convert it with .to(...)")
        if spec.dtype != p.q.dtype:
            raise TypeError(
                f"q, k and v must have one type, got q {p.q.dtype}, {name} {spec.dtype}; convert one of them"
            )
        if spec.device != p.q.device:
            raise ValueError(
                f"q, k and v must be on one device, got q on {p.q.device}, {name} on {spec.device}; "
                "move one of them with .to(...)"
            )
    if not p.recipe.varlen and not p.q.shape[0] == p.k.shape[0] == p.v.shape[0]:
        sizes = f"{p.q.shape[0]}, {p.k.shape[0]}, {p.v.shape[0]}"
        raise ValueError(f"q, k and v must have one batch size, got {sizes}; expand those of size 1 with .expand(...)")
    if p.k.shape[:-1] != p.v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in all but the head size, got {tuple(p.k.shape)} and {tuple(p.v.shape)}; "
            "give each key one value"
        )
    if 0 in (p.H, p.H_k) or p.H % p.H_k != 0:
        hint = "give both some" if 0 in (p.H, p.H_k) else "repeat or drop heads of k and v"
        other = _heads_first(p)
        hint = TRANSPOSE if 0 not in (other.H, other.H_k) and other.H % other.H_k == 0 else hint
        raise ValueError(f"q's heads must be a multiple of k's, got {p.H} and {p.H_k}; {hint}")
    if p.k.shape[-1] != p.D:
        raise ValueError(
            f"q and k must have one head size, got {p.D} and {p.k.shape[-1]}; project both to one (v's may differ)"
        )
    for name, size in (("q and k", p.D), ("v", p.D_v)):
        if not 1 <= size <= MAX_HEAD_SIZE:
            raise ValueError(
                f"the head size of {name} must be between 1 and {MAX_HEAD_SIZE}, got {size}; split or pad the heads"
            )


def _heads_first(p: Problem) -> Problem:
    """Return the problem with q, k and v transposed, to see whether they were laid out with the heads first."""
    if p.recipe.varlen:
        return p
    q, k, v = (s._replace(shape=(s.shape[0], s.shape[2], s.shape[1], s.shape[3])) for s in (p.q, p.k, p.v))
    return p._replace(q=q, k=k, v=v)


def _check_recipe(p: Problem) -> None:
    r = p.recipe
    if r.precision is not None and p.dtype != torch.float32:
        raise ValueError(
            f"precision must be None for any type but fp32, got {r.precision!r} with {p.dtype}; "
            "leave it out, or convert q, k and v to fp32"
        )
    if r.varlen:
        for kind in p.kinds:
            if not (kind.varlen and getattr(kind, "interval", True)):
                raise Unsupported(
                    f"{_public_name(kind)} has no meaning for packed sequences (layout=Varlen); "
                    "pad the batch, or use Causal, Window, Prefix, Padding (lengths), SoftCap or Alibi"
                )


def _check_lengths(p: Problem) -> None:
    """Raise ValueError for sequences of 2^30 rows or more: kernels use 32-bit indices, and OPEN as "no bound".

    Symbolic lengths are not compared, because an exported graph would then carry the bound.
    """
    for name, length in (("q", p.M), ("k and v", p.N)):
        if length >= masks.OPEN:
            raise ValueError(
                f"{name} must have fewer than 2^30 = {masks.OPEN} rows in a sequence, got {length}; split the sequence"
            )


def _check_extra(p: Problem) -> None:
    specs = iter(p.extra)
    full = (p.B, p.H, p.M, p.N)
    for kind in p.kinds:
        name = _public_name(kind)
        for capture in kind.captures:
            spec = next(specs)
            _same_device(p, f"{name}: {capture}", spec)
            if kind in (masks.Dense, scores.Bias):
                if not _broadcasts(spec.shape, full):
                    other = _heads_first(p)
                    fits = _broadcasts(spec.shape, (other.B, other.H, other.M, other.N))
                    hint = TRANSPOSE if fits else "expand or reshape it"
                    raise ValueError(
                        f"{name}: {capture} must broadcast to (B, H, M, N) = {full}, got {tuple(spec.shape)}; {hint}"
                    )
                continue
            allowed = captured_shapes(p, kind, capture)
            if tuple(spec.shape) not in allowed:
                shapes = " or ".join(str(shape) for shape in allowed)
                fits = tuple(spec.shape) in captured_shapes(_heads_first(p), kind, capture)
                hint = TRANSPOSE if fits else "make it fit q and k"
                raise ValueError(f"{name}: {capture} must have shape {shapes}, got {tuple(spec.shape)}; {hint}")
    if p.recipe.sink:
        spec = next(specs)
        _same_device(p, "sink", spec)
        if tuple(spec.shape) != (p.H,):
            hint = TRANSPOSE if tuple(spec.shape) == (_heads_first(p).H,) else "give each query head one logit"
            raise ValueError(f"sink must have shape (H,) = ({p.H},), got {tuple(spec.shape)}; {hint}")
        if spec.dtype not in (torch.float32, p.dtype):
            raise TypeError(f"sink must be fp32 or {p.dtype} like q, got {spec.dtype}; convert it with .to(...)")
    for name, spec in zip(("Varlen: cu_q", "Varlen: cu_k"), specs, strict=False):
        _same_device(p, name, spec)


def captured_shapes(p: Problem, kind: type[Value], capture: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes a captured tensor may have. Dense and Bias also take any that broadcasts to theirs."""
    return {
        masks.Prefix: ((p.B,),),
        masks.PaddingLengths: ((p.B,),),
        masks.PaddingKeys: ((p.B, p.N),),
        masks.Documents: ((p.B, p.M if capture == "q_ids" else p.N),),
        scores.Alibi: ((p.H,), (p.B, p.H)),
    }.get(kind, ((p.B, p.H, p.M, p.N),))


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(s in (1, f) for s, f in zip(reversed(shape), reversed(full), strict=False))


def _same_device(p: Problem, name: str, spec: Spec) -> None:
    if spec.device != p.q.device:
        raise ValueError(f"{name} must be on q's device {p.q.device}, got {spec.device}; move it with .to(...)")


def _public_name(kind: type[Value]) -> str:
    return {masks.PaddingLengths: "Padding", masks.PaddingKeys: "Padding (bool)"}.get(kind, kind.__name__)


def check_contents(problem: Problem, x: Operands) -> None:
    """Check the values in cu_seqlens and in lengths. This synchronises with a GPU."""
    N: Any = problem.N
    if problem.recipe.varlen:
        cu_q, cu_k = x.extra[-2:]
        _check_offsets("cu_q", cu_q, problem.q.shape[0], problem.max_q)
        _check_offsets("cu_k", cu_k, problem.k.shape[0], problem.max_k)
        N = cu_k.diff()
    for part in problem.values(x.extra)[0]:
        for lengths in part.tensors if isinstance(part, masks.Prefix | masks.PaddingLengths) else ():
            if bool(((lengths < 0) | (lengths > N)).any()):
                name = _public_name(type(part))
                raise ValueError(
                    f"{name}: lengths must lie between 0 and the number of keys, got {lengths.tolist()}; "
                    "clamp them with .clamp(...)"
                )


def _check_offsets(name: str, cu: Tensor, total: int, longest: int) -> None:
    steps = cu.diff()
    if int(cu[0]) != 0 or int(cu[-1]) > total or bool((steps < 0).any()):
        raise ValueError(
            f"Varlen: {name} must start at 0, never decrease and end at {total} rows or before, got {cu.tolist()}; "
            "write the cumulative sum of the lengths"
        )
    if steps.numel() and int(steps.max()) > longest:
        raise ValueError(
            f"Varlen: max_{name[-1]} must be at least the longest length in {name}, {int(steps.max())}, got {longest}; "
            "pass that, or None to have it read"
        )


def check_number(name: str, number: Any, allowed: str, low: float, high: float) -> float:
    """Return a finite float in [low, high), or raise an error that names the argument."""
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name} must be {allowed}, got {number!r}; pass a number, or leave it out")
    number = masks.constant(float(number))
    if not (math.isfinite(number) and low <= number < high):
        raise ValueError(f"{name} must be {allowed}, got {number}; leave it out for the default")
    return number
