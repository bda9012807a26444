"""Validation: turn the arguments of a call into a checked Problem.

Errors name the argument, its value, what is allowed and the remedy.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..values.layout import Cached, Layout, Varlen
from ..values.masks import Mask
from ..values.origin import Origin
from ..values.products import EightBits, Quantized
from ..values.rotation import check_columns, check_positions
from ..values.score import Score
from ..values.tables import TileList
from ..values.value import FLOATING_TYPES, OPEN, Unsupported, Value, constant
from .backend import ORDER
from .check_cache import check_cache, check_cache_contents, refuse_gradients, with_scales
from .check_quantized import check_scales, given_beforehand, refuse_gradients_of_e4m3, without_scales
from .operands import Operands
from .options import refuse_mask, refuse_score
from .problem import MAX_HEAD_SIZE, Problem, TensorSpec, matmul_setting, target_of
from .recipe import EIGHT_BITS, KINDS, PRECISIONS, Recipe

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
    """Cast a tensor as torch's autocast does for attention: every floating type except fp64."""
    return tensor.to(kind) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def check_arguments(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    mask: Mask,
    score: Score | Sequence[Score],
    scale: float | None,
    sink: Tensor | None,
    dropout: float,
    layout: Layout | None,
    precision: str | EightBits | None,
    deterministic: bool,
    backend: str | None,
    out_dtype: torch.dtype | None = None,
    place: Origin | None = None,
) -> tuple[Operands, Recipe, tuple[int, int]]:
    """Check the arguments; return all tensors of the call in order, the recipe, and max_q and max_k of the layout."""
    scales: tuple[Tensor, ...] = ()
    of_all: tuple[Tensor, ...] = ()  # the scales of q, k and v where all are in e4m3
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        q, k, v, of_all, scales = _unwrap(q, k, v, layout, precision)
    if not q.layout is k.layout is v.layout is torch.strided:
        refuse_operands(q=q, k=k, v=v)
    told: tuple[Tensor, ...] = ()
    tables, rotary = told, None
    if isinstance(precision, EightBits):
        precision, told, tables, rotary = given_beforehand(precision, q, layout)
    if not isinstance(mask, Mask):
        refuse_mask(mask)
    changes = _scores(score)
    if layout is not None and not isinstance(layout, (Varlen, Cached)):
        raise TypeError(
            f"layout must be None, a Varlen or a Cached, got {layout!r}; write layout=tilewise.Varlen(cu_q, cu_k)"
        )
    if scale is not None:
        scale = check_number("scale", scale, "finite, >= 0 and below 2^126", 0.0, 2.0**126)
    left_out = type(dropout) is float and dropout == 0.0  # torch.compile needs the constant itself
    dropout = 0.0 if left_out else check_number("dropout", dropout, "a probability in [0, 1)", 0.0, 1.0)
    if precision is not None and precision not in (*PRECISIONS, *EIGHT_BITS):
        raise ValueError(
            f"precision must be None or one of {', '.join((*PRECISIONS, *EIGHT_BITS))}, got {precision!r}; "
            "leave it out to follow torch.get_float32_matmul_precision()"
        )
    if backend is not None and backend not in ORDER:
        raise ValueError(
            f"backend must be None or one of {', '.join(ORDER)}, got {backend!r}; leave it out to have one chosen"
        )
    if sink is not None and (not isinstance(sink, Tensor) or sink.layout is not torch.strided):
        got = sink.layout if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"sink must be a strided tensor of shape (H,), got {got}; pass one logit for each query head")
    if not of_all and (kind := autocast_type(q)) is not None:
        q = cast(q, kind)
        k, v = (k, v) if scales else (cast(k, kind), cast(v, kind))
        if sink is not None and sink.dtype != torch.float32:  # an fp32 sink goes with any type of q
            sink = cast(sink, kind)
    parts = mask.parts + mask.lists
    values: tuple[Value, ...] = parts + changes
    check_values(values)
    if place is not None:
        parts, changes = [_placed(each, place, q, k, layout, rotary) for each in (parts, changes)]
        values = parts + changes
    captured = [t for value in values if value.captures for t in value.tensors]
    of_sink, of_layout = () if sink is None else (sink,), () if layout is None else (*layout.tensors, *scales)
    extra = (*captured, *of_sink, *of_all, *told, *tables, *of_layout)
    if isinstance(layout, Cached):
        refuse_gradients(q, k, v, *extra)
    if of_all:
        refuse_gradients_of_e4m3(of_all, extra)
    recipe = Recipe(
        tuple([part.plain for part in parts]),
        tuple([change.plain for change in changes]),
        sink is not None,
        () if layout is None else with_scales(layout.plain) if scales else layout.plain,
        scale,
        dropout,
        precision,
        bool(deterministic) or asks_for_determinism(),
        backend,
        out_dtype=_out_dtype(out_dtype, torch.bfloat16 if of_all else q.dtype),
        place=None if place is None or not dropout else _counters(place, q),
        quantized=bool(of_all),
        given=bool(told),
        rotary=rotary,
    )
    return Operands(q, k, v, extra), recipe, (0, 0) if layout is None else layout.longest()


def _placed(
    values: tuple[Any, ...], place: Origin, q: Tensor, k: Tensor, layout: Layout | None, rotary: str | None
) -> tuple[Any, ...]:
    """Return masks or scores as they are at a place in the whole."""
    if not isinstance(place, Origin):
        raise TypeError(f"place must be None or an Origin, got {place!r}; write place=tilewise.Origin(row, column)")
    if rotary and (place.row or place.column):
        raise ValueError(
            f"place must have row=0 and column=0 where EightBits has cos and sin, got {place.row} and {place.column}; "
            "rotate q and k by tilewise.rotary before, and leave cos and sin out"
        )
    if layout is None:
        return tuple([value.placed(place, q.shape[-3], k.shape[-3]) for value in values])
    if place.row or place.column:
        raise ValueError(
            f"place must have row=0 and column=0 with a layout, got {place.row} and {place.column}; "
            "pass whole sequences, or leave row and column out"
        )
    return values


def _counters(place: Origin, q: Tensor) -> tuple[int, int, int, int, int] | None:
    """Return from where dropout counts, as the recipe holds it; None if that is the call's own beginning."""
    heads = q.shape[-2] if place.heads is None else place.heads
    if place.head + q.shape[-2] > heads:
        raise ValueError(
            f"place must have room for q's {q.shape[-2]} heads, got head {place.head} of {heads}; "
            "pass heads=, the number of the whole's query heads"
        )
    found = place.row, place.column, place.head, heads, place.batch
    return None if found == (0, 0, 0, q.shape[-2], 0) else found


def _out_dtype(out_dtype: torch.dtype | None, of_q: torch.dtype) -> str | None:
    """Return the recipe's word for a type of o: None for q's own."""
    if out_dtype is None or out_dtype == of_q:
        return None
    if out_dtype != torch.float32 or of_q not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"out_dtype must be None, q's type {of_q}, or torch.float32 for 16-bit inputs, got {out_dtype!r}; "
            "leave it out, and convert o"
        )
    return "float32"


def _scores(score: Score | Sequence[Score]) -> tuple[Score, ...]:
    """Check one score or several, and return them as a tuple."""
    if isinstance(score, Score):
        score = (score,)
    elif isinstance(score, str) or not isinstance(score, (tuple, list, Sequence)):  # the last check is slow
        refuse_score(score)
    for change in score:
        if not isinstance(change, Score):
            refuse_score(change)
        fixed = () if change.learns else change.tensors
        if fixed and any([t.requires_grad for t in fixed]) and torch.is_grad_enabled():
            name, tensors = change.public_name(), " and ".join(change.captures)
            raise ValueError(
                f"{name}: {tensors} must have no gradient, got requires_grad=True; detach it, or write it as a Bias, "
                "which has one"
            )
    return tuple(score)


def asks_for_determinism() -> bool:
    """Tell whether torch.use_deterministic_algorithms(True) is in force with errors, not only with warnings."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Dynamo cannot trace this function, and compiles again when the setting changes. We set the attribute that
# torch.compiler.assume_constant_result sets, because calling that would import all of torch._dynamo.
asks_for_determinism._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unwrap(
    q: Any, k: Any, v: Any, layout: Layout | None, precision: str | EightBits | None
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    if Quantized not in (type(q), type(k), type(v)):
        refuse_operands(q=q, k=k, v=v)
    return without_scales(q, k, v, layout, precision)


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
    if x.q.ndim != 4 - recipe.varlen or x.v.ndim != x.q.ndim:
        return  # `checked` says so
    *rows, H, _ = x.q.shape
    of_o = (*rows, H, x.v.shape[-1])
    of_lse = (H, *rows) if recipe.varlen else (*rows[:1], H, *rows[1:])
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


def dropout_seed(seed: int | Tensor | None, q: Tensor, dropout: float) -> Tensor | None:
    """Return dropout's seed as a scalar int64 tensor on q's device, drawn if None; its value is never read back."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed must be an int or a scalar int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}; "
                "pass an int, or leave it out to have one drawn"
            )
        if seed.device != q.device:
            raise ValueError(f"seed must be on q's device {q.device}, got {seed.device}; move it with .to(...)")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or a scalar int64 tensor, got {seed!r}; leave it out to have one drawn")
    elif isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits, got {seed}; pass one in [-2^63, 2^63)")
    if dropout == 0.0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=q.device)


def describe(x: Operands, recipe: Recipe, longest: tuple[int, int], wanted: tuple[bool, ...] = ()) -> Problem:
    """Return the checked Problem of a call with real tensors. `longest`: (max_q, max_k), used for packed sequences."""
    matmul = matmul_setting() if x.q.dtype == torch.float32 and not recipe.precision else None
    return _described(recipe, seen((*x[:3], *x.extra)), longest, matmul, wanted)


def seen(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return all that a kernel may depend on of real tensors, in plain tuples, which are cheaper than TensorSpecs."""
    return tuple([(t.shape, t.dtype, t.device, t.stride(), t.data_ptr() % 16 == 0) for t in tensors])


@lru_cache(4096)
def _described(
    recipe: Recipe, seen: tuple[Any, ...], longest: tuple[int, int], matmul: str | None, wanted: tuple[bool, ...]
) -> Problem:
    """Build the Problem of what is `seen` of its tensors."""
    q, k, v, *extra = (TensorSpec(tuple(shape), *rest) for shape, *rest in seen)
    problem = checked(Problem(recipe, q, k, v, tuple(extra), *longest, target_of(q.device), matmul, wanted))
    _check_lengths(problem)
    return problem


def describe_fake(x: Operands, recipe: Recipe, longest: tuple[int, int], target: str = "meta") -> Problem:
    """Return the checked Problem for fake or meta tensors. Sizes may be symbolic, so nothing is hashed."""
    extra = tuple(TensorSpec.of(t, real=False) for t in x.extra)
    q, k, v = (TensorSpec.of(t, real=False) for t in x[:3])
    return checked(Problem(recipe, q, k, v, extra, *longest, target, None))


def checked(p: Problem) -> Problem:
    """Return the problem if shapes, types and devices fit; else raise a TypeError or ValueError with the remedy."""
    check_cache(p) if p.recipe.cached else _check_shapes(p)
    _check_types(p)
    _check_heads(p)
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


def _check_shapes(p: Problem) -> None:
    rank, shape = (3, "(T, heads, head size)") if p.recipe.varlen else (4, "(batch, length, heads, head size)")
    for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
        if len(spec.shape) != rank:
            hint = "pass layout=Varlen(...) for packed sequences" if len(spec.shape) == 3 else "reshape it"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(spec.shape)}; {hint}")
    if not p.recipe.varlen and not p.q.shape[0] == p.k.shape[0] == p.v.shape[0]:
        sizes = f"{p.q.shape[0]}, {p.k.shape[0]}, {p.v.shape[0]}"
        raise ValueError(f"q, k and v must have one batch size, got {sizes}; expand those of size 1 with .expand(...)")


def _check_types(p: Problem) -> None:
    for name, spec in (("q", p.q), ("k", p.k), ("v", p.v)):
        quantized = p.recipe.quantized or (name != "q" and p.in_layout(f"{name}_scale") is not None)
        if not quantized and spec.dtype not in FLOATING_TYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {spec.dtype}; convert it with .to(...)")
        if not quantized and spec.dtype != p.q.dtype:
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
    for name, size in (("q and k", p.D), ("v", p.D_v)):
        if not 1 <= size <= MAX_HEAD_SIZE:
            raise ValueError(
                f"the head size of {name} must be between 1 and {MAX_HEAD_SIZE}, got {size}; split or pad the heads"
            )


def _heads_first(p: Problem) -> Problem:
    """Return the problem with q, k and v transposed, to see whether they were laid out with the heads first."""
    if p.recipe.layout:
        return p
    q, k, v = (s._replace(shape=(s.shape[0], s.shape[2], s.shape[1], s.shape[3])) for s in (p.q, p.k, p.v))
    return p._replace(q=q, k=k, v=v)


def _check_recipe(p: Problem) -> None:
    r = p.recipe
    if r.precision in EIGHT_BITS and p.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"precision must be None or one of {', '.join(PRECISIONS)} for {p.dtype}, got {r.precision!r}; "
            "convert q, k and v to fp16 or bf16 for 8-bit products"
        )
    if r.precision in PRECISIONS and p.dtype != torch.float32:
        cast = torch._C._is_any_autocast_enabled()  # type: ignore[attr-defined]
        raise ValueError(
            f"precision must be None, int8 or fp8 for any type but fp32, got {r.precision!r} with {p.dtype}"
            f"{', autocast is on' if cast else ''}; leave it out, or "
            f"{'turn autocast off for this call' if cast else 'convert q, k and v to fp32'}"
        )
    if r.varlen:
        for kind in p.kinds:
            if not (kind.varlen and kind.interval):
                raise Unsupported(
                    f"{kind.public_name()} has no meaning for packed sequences (layout=Varlen); "
                    "pad the batch, or use Causal, Window, Prefix, Padding (lengths), SoftCap or Alibi"
                )
    for name, *numbers in r.mask:
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
    if p.recipe.rotary:
        check_positions(max(p.M, p.N), p.extra[p.after_sink + 2 * p.recipe.given].shape[0])


def _check_extra(p: Problem) -> None:
    specs = iter(p.extra)
    for kind, (_, *numbers) in zip(p.kinds, p.recipe.mask + p.recipe.score, strict=True):
        for n, whole in enumerate(kind.whole_shapes(p, tuple(numbers))):
            spec, name = next(specs), f"{kind.public_name()}: {kind.captures[n]}"
            _same_device(p, name, spec)
            if fits(kind, spec.shape, whole):
                continue
            if kind.broadcasts:
                allowed = f"broadcast to ({', '.join(kind.shapes[n])}) = {whole}"
            else:
                allowed = f"have shape {f'{whole[1:]} or {whole}' if kind.unbatched else whole}"
            transposed = fits(kind, spec.shape, kind.whole_shapes(_heads_first(p), tuple(numbers))[n])
            hint = TRANSPOSE if transposed else "expand or reshape it" if kind.broadcasts else "make it fit q and k"
            raise ValueError(f"{name} must {allowed}, got {tuple(spec.shape)}; {hint}")
    if p.recipe.sink:
        spec = next(specs)
        _same_device(p, "sink", spec)
        if tuple(spec.shape) != (p.H,):
            hint = TRANSPOSE if tuple(spec.shape) == (_heads_first(p).H,) else "give each query head one logit"
            raise ValueError(f"sink must have shape (H,) = ({p.H},), got {tuple(spec.shape)}; {hint}")
        if spec.dtype not in (torch.float32, p.dtype):
            raise TypeError(f"sink must be fp32 or {p.dtype} like q, got {spec.dtype}; convert it with .to(...)")
    for name in ("q", "k", "v") if p.recipe.quantized else ():
        _same_device(p, f"{name}'s scale", next(specs))
    for name in ("mean", "balance") if p.recipe.given else ():
        spec, whole = next(specs), (p.B, p.H_k, p.D)
        _same_device(p, f"EightBits: {name}", spec)
        if tuple(spec.shape) != whole:
            raise ValueError(
                f"EightBits: {name} must have shape {whole[1:]} or {whole}, got {tuple(spec.shape)}; make it fit k"
            )
    if p.recipe.rotary:
        check_columns(next(specs).shape[1], p.D)
        next(specs)
    for name, spec in zip(p.recipe.layout[1] if p.recipe.layout else (), specs, strict=True):
        _same_device(p, f"{p.recipe.layout[0]}: {name}", spec)


def fits(kind: type[Value], shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Tell whether a captured tensor may have a shape, where `whole` is that with all dimensions."""
    if kind.broadcasts:
        return len(shape) <= len(whole) and all(s in (1, w) for s, w in zip(shape[::-1], whole[::-1], strict=False))
    return tuple(shape) == whole or (kind.unbatched and tuple(shape) == whole[1:])


def _same_device(p: Problem, name: str, spec: TensorSpec) -> None:
    if spec.device != p.q.device:
        raise ValueError(f"{name} must be on q's device {p.q.device}, got {spec.device}; move it with .to(...)")


def check_contents(problem: Problem, x: Operands) -> None:
    """Check the values in cu_seqlens, in lengths and in scales. This synchronises with a GPU."""
    N: Any = problem.N
    masks, scores, _ = problem.values(x.extra)
    if problem.recipe.quantized or problem.recipe.given:
        check_scales(problem, x)
    if problem.recipe.varlen:
        cu_q, cu_k = x.extra[-2:]
        check_offsets("cu_q", cu_q, problem.q.shape[0], problem.max_q)
        check_offsets("cu_k", cu_k, problem.k.shape[0], problem.max_k)
        N = cu_k.diff()
    if problem.recipe.cached:
        N = check_cache_contents(problem, x, masks)
    for value in masks + scores:
        value.check_contents(N)


def check_offsets(name: str, cu: Tensor, total: int, longest: int) -> None:
    """Raise ValueError unless `cu` cuts `total` rows, or some of them, into sequences of at most `longest` rows."""
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
    number = constant(float(number))
    if not (math.isfinite(number) and low <= number < high):
        raise ValueError(f"{name} must be {allowed}, got {number}; leave it out for the default")
    return number
