"""Validation: turn the arguments of a call into a checked Problem.

Errors name the argument, its value, what is allowed and the remedy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..values.dropout import Dropout
from ..values.layout import Layout
from ..values.listed import TileList
from ..values.masks import Mask
from ..values.origin import Origin
from ..values.products import EightBits
from ..values.quantized import Quantized, unwrap
from ..values.score import Score
from ..values.value import FLOATING_TYPES, OPEN, Value, number_in
from .backend import ORDER
from .operands import Operands
from .options import as_mask, as_scores
from .problem import MAX_HEAD_SIZE, MAX_VALUE_SIZE, Problem, TensorSpec, inside, lse_shape, matmul_setting, target_of
from .recipe import KINDS, Recipe

TRANSPOSE = (
    "did you mean q.transpose(1, 2), and so k and v? Shapes are (batch, length, heads, head size); those of torch's "
    "scaled_dot_product_attention have the heads before the length"
)
"""The remedy where q, k and v with the heads first would fit."""


def autocast_type(q: Tensor) -> torch.dtype | None:
    """Return autocast's type for q's device; None if autocast is off."""
    if q.is_meta:
        return None
    device = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type  # device.type is slower to read
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Cast a tensor as torch's autocast does for attention: every floating type except fp64, and those of 8 bits."""
    return tensor.to(kind) if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) else tensor


def check_arguments(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    mask: Mask | Callable[..., Any],
    score: Score | Callable[..., Any] | Sequence[Score | Callable[..., Any]],
    scale: float | None,
    sink: Tensor | None,
    dropout: float,
    layout: Layout | None,
    precision: str | EightBits | None,
    deterministic: bool,
    backend: str | None,
    out_dtype: torch.dtype | None = None,
    origin: Origin | None = None,
) -> tuple[Operands, Recipe, tuple[int, int]]:
    """Check the arguments; return all tensors of the call in order, the recipe, and max_q and max_k of the layout."""
    lies, origin = Layout.of(layout), Origin.of(origin)
    q, k, v, lies, products = unwrap(q, k, v, lies, precision)
    refuse_operands(q=q, k=k, v=v)
    products = products.prepared(q, lies)
    mask, changes = as_mask(mask), as_scores(score)
    if scale is not None:
        scale = number_in("scale", scale, "finite, >= 0 and below 2^126", 0.0, 2.0**126)
    drop = Dropout.of(dropout)
    if backend is not None and backend not in ORDER:
        raise ValueError(
            f"backend must be None or one of {', '.join(ORDER)}, got {backend!r}; leave it out to have one chosen"
        )
    if sink is not None and (not isinstance(sink, Tensor) or sink.layout is not torch.strided):
        got = sink.layout if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"sink must be a strided tensor of shape (H,), got {got}; pass one logit for each query head")
    if (kind := autocast_type(q)) is not None:
        q, k, v = cast(q, kind), cast(k, kind), cast(v, kind)
        if sink is not None and sink.dtype != torch.float32:  # an fp32 sink goes with any type of q
            sink = cast(sink, kind)
    own = tuple([part.prepared(lies, q, k) for part in mask.parts])
    parts = own + mask.tile_lists
    check_values(parts + changes)
    products.check_origin(origin)
    if origin.plain:
        placed = lies.place(own, origin, q, k)
        same = all([one is other for one, other in zip(placed, own, strict=True)])
        parts = placed + mask.tile_lists * same  # which are of the mask as it was
        changes = lies.place(changes, origin, q, k)
    captured = [t for value in parts + changes if value.captures for t in value.tensors]
    extra = (*captured, *(() if sink is None else (sink,)), *products.tensors, *lies.tensors)
    for option in (lies, products):
        option.refuse_gradients(q, k, v, *extra)
    recipe = Recipe(
        tuple([part.plain for part in parts]),
        tuple([change.plain for change in changes]),
        sink is not None,
        lies.plain,
        scale,
        drop.probability,
        products.plain,
        bool(deterministic) or asks_for_determinism(),
        backend,
        out_dtype=products.out_dtype(out_dtype, q.dtype),
        origin=origin.of_heads(q.shape[-2]).plain if drop.probability else (),
    )
    return Operands(q, k, v, extra), recipe, lies.longest()


def asks_for_determinism() -> bool:
    """Tell whether torch.use_deterministic_algorithms(True) is in force with errors, not only with warnings."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Dynamo cannot trace this function, and compiles again when the setting changes. We set the attribute that
# torch.compiler.assume_constant_result sets, because calling that would import all of torch._dynamo.
asks_for_determinism._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_operands(**operands: Any) -> None:
    """Raise TypeError or ValueError for what is no strided tensor."""
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor(...)"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} must be a strided tensor, got layout {tensor.layout}; convert it with .to_dense(), and pass "
                "sequences of several lengths packed, with layout=Varlen(...)"
            )


def check_results(
    x: Operands,
    recipe: Recipe,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor | None,
) -> None:
    """Raise a TypeError or ValueError if a forward's results and their gradients do not fit its operands."""
    if dlse is not None and delta is not None:
        raise ValueError("dlse and delta must not be given both, got two tensors; leave out dlse, which delta contains")
    if x.q.ndim not in (3, 4) or x.v.ndim != x.q.ndim:
        return  # `checked` says so
    of_o, of_lse = (*x.q.shape[:-1], x.v.shape[-1]), lse_shape(x.q.shape)
    row_type = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    own = (x.q.dtype, torch.float32) if recipe.out_dtype else (x.q.dtype,)
    for name, t in (("do", do), ("o", o), ("lse", lse), ("dlse", dlse), ("delta", delta)):
        shape, kinds = (of_o, own) if name in ("do", "o") else (of_lse, (row_type,))
        if t is None and name in ("dlse", "delta"):
            continue
        if not isinstance(t, Tensor):
            got = type(t).__name__
        elif tuple(t.shape) != shape or t.dtype not in kinds or t.device != x.q.device:
            got = f"{t.dtype} {tuple(t.shape)} on {t.device}"
        else:
            continue
        raise ValueError(
            f"{name} must be a tensor of {kinds[0]} with shape {shape} on {x.q.device}, got {got}; "
            "pass the forward's results, and gradients that fit them"
        )


def describe(x: Operands, recipe: Recipe, longest: tuple[int, int], wanted: tuple[bool, ...] = ()) -> Problem:
    """Return the checked Problem of a call with real tensors. `longest`: (max_q, max_k), used for packed sequences."""
    matmul = matmul_setting() if x.q.dtype == torch.float32 and not recipe.precision else None
    q, k, v, *extra = (TensorSpec.of(t) for t in (*x[:3], *x.extra))
    within = inside(x.k, x.v)
    problem = checked(Problem(recipe, q, k, v, tuple(extra), *longest, target_of(q.device), matmul, wanted, within))
    _check_lengths(problem)
    return problem


def describe_fake(x: Operands, recipe: Recipe, longest: tuple[int, int], target: str = "meta") -> Problem:
    """Return the checked Problem for fake or meta tensors. Sizes may be symbolic, so nothing is hashed."""
    extra = tuple(TensorSpec.of(t, real=False) for t in x.extra)
    q, k, v = (TensorSpec.of(t, real=False) for t in x[:3])
    return checked(Problem(recipe, q, k, v, extra, *longest, target, None))


def checked(p: Problem) -> Problem:
    """Return the problem if shapes, types and devices fit; else raise a TypeError or ValueError with the remedy."""
    p.layout.check(p)
    _check_types(p)
    _check_heads(p)
    p.products.check(p)
    _check_lists(p)
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


def _check_types(p: Problem) -> None:
    scaled = p.products.scaled + p.layout.scaled
    for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
        if name not in scaled:
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


def check_pair(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raise ValueError unless the shapes of k and v agree in all but the head size."""
    if k[:-1] != v[:-1]:
        raise ValueError(
            f"k and v must agree in all but the head size, got {tuple(k)} and {tuple(v)}; give each key one value"
        )


def _check_heads(p: Problem) -> None:
    check_pair(p.k.shape, p.v.shape)
    if 0 in (p.H, p.H_k) or p.H % p.H_k != 0:
        hint = "give both some" if 0 in (p.H, p.H_k) else "repeat or drop heads of k and v"
        other = _heads_first(p)
        hint = TRANSPOSE if 0 not in (other.H, other.H_k) and other.H % other.H_k == 0 else hint
        raise ValueError(f"q's heads must be a multiple of k's, got {p.H} and {p.H_k}; {hint}")
    if p.k.shape[-1] != p.D:
        raise ValueError(
            f"q and k must have one head size, got {p.D} and {p.k.shape[-1]}; project both to one (v's may differ)"
        )
    for name, size, most in (("q and k", p.D, MAX_HEAD_SIZE), ("v", p.D_v, MAX_VALUE_SIZE)):
        if not 1 <= size <= most:
            raise ValueError(
                f"the head size of {name} must be between 1 and {most}, got {size}; split or pad the heads"
            )


def _heads_first(p: Problem) -> Problem:
    """Return the problem with q, k and v transposed, to see whether they were laid out with the heads first."""
    q, k, v = (spec._replace(shape=p.layout.heads_first(spec.shape)) for spec in (p.q, p.k, p.v))
    return p._replace(q=q, k=k, v=v)


def _check_lists(p: Problem) -> None:
    for name, *numbers in p.recipe.mask:
        if name == TileList.__name__ and (made_for := numbers[-2:]) != [p.M, p.N]:
            raise ValueError(
                f"mask must be listed for {p.M} queries and {p.N} keys, got one for {made_for[0]} and {made_for[1]}; "
                "call tilewise.listed with q, k and v of these lengths"
            )


def _check_lengths(p: Problem) -> None:
    """Raise ValueError for sequences longer than rotary's tables, or of 2^30 rows, as indices have 32 bits.

    Symbolic lengths are not compared, because an exported graph would then carry the bound.
    """
    for name, length in (("q", p.M), ("k and v", p.N)):
        if length >= OPEN:
            raise ValueError(
                f"{name} must have fewer than 2^30 = {OPEN} rows in a sequence, got {length}; split the sequence"
            )
    p.products.check_lengths(p)


def _check_extra(p: Problem) -> None:
    specs = iter(p.extra)
    for kind, (_, *numbers) in zip(p.kinds, p.recipe.mask + p.recipe.score, strict=True):
        for n, whole in enumerate(kind.whole_shapes(p, tuple(numbers))):
            spec, name = next(specs), f"{kind.public_name()}: {kind.captures[n]}"
            p.check_devices({name: spec})
            if kind.fits(spec.shape, whole):
                continue
            transposed = kind.fits(spec.shape, kind.whole_shapes(_heads_first(p), tuple(numbers))[n])
            hint = TRANSPOSE if transposed else "expand or reshape it" if kind.broadcasts else "make it fit q and k"
            raise ValueError(f"{name} must {kind.allowed(n, whole)}, got {tuple(spec.shape)}; {hint}")
    if p.recipe.sink:
        spec = next(specs)
        p.check_devices({"sink": spec})
        if tuple(spec.shape) != (p.H,):
            hint = TRANSPOSE if tuple(spec.shape) == (_heads_first(p).H,) else "give each query head one logit"
            raise ValueError(f"sink must have shape (H,) = ({p.H},), got {tuple(spec.shape)}; {hint}")
        if spec.dtype not in (torch.float32, p.dtype):
            raise TypeError(f"sink must be fp32 or {p.dtype} like q, got {spec.dtype}; convert it with .to(...)")


def check_contents(problem: Problem, x: Operands) -> None:
    """Check the values in cu_seqlens, in lengths and in scales. This synchronises with a GPU."""
    masks, scores, _ = problem.values(x.extra)
    problem.recipe.products_of(x.extra).check_contents()
    M, N = problem.recipe.layout_of(x.extra).check_contents(problem, masks)
    for value in masks + scores:
        value.check_contents(M, N)
