"""PyTorch's dispatcher: custom operators, fake kernels, autograd, vmap and FLOP formulas of attention.

A call takes one of two paths to a back end; `attend` decides. torch.compile, torch.export, checkpointing policies, vmap
and every dispatch mode see two operators, `tilewise::attention` and `tilewise::attention_backward`. Plain eager calls
skip the dispatcher and use one autograd.Function. That takes a third of the host time, and it alone can carry the extra
tensors that a back end saves for its backward, because operators have a fixed signature.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from . import quantize
from .backend import select
from .check import check_contents, describe, describe_fake
from .count import COUNTING, count_ran
from .import_hook import when_imported
from .problem import EIGHT_BITS, Grads, Operands, Problem, Recipe, Saved, batched_ranks

NO_FORWARD_MODE = "tilewise has no forward-mode derivative (jvp, forward_ad); use reverse mode (backward, grad, vjp)"
PLAIN = {Tensor, torch.nn.Parameter}
"""Classes whose memory a back end may read directly; another subclass may store its data anywhere."""
CHECK = os.environ.get("TILEWISE_CHECK") == "1"
NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")
"""Of the operators: the package's name, so that copies of it under other names can share a process."""
OPERATORS = getattr(torch.ops, NAMESPACE)
BY_RANK: dict[type, Callable[..., tuple[Tensor, Tensor]]] = {}
"""Who computes calls with a class of tensors of which each rank holds a part: `parallel/dtensor.py`, of DTensors."""
Longest = tuple[int, int]
Call = tuple[Recipe, Longest, Problem | None]
"""Everything about a call but its tensors; the Problem where the caller has described it already."""
Tensors = Sequence[Any]
"""q, k, v, then every extra operand; if packed, qkv, None, None, then those. Gradients come in the same order."""


def attend(
    x: Tensors, seed: Tensor | None, recipe: Recipe, longest: Longest, problem: Problem | None = None
) -> tuple[Tensor, Tensor]:
    """Return o and lse, differentiable, by the operator or the eager path. `problem`: the call's, if it is known."""
    refuse_forward_mode(*x)
    if torch.compiler.is_compiling():
        if differentiated():
            return _outside_graphs(x, seed, recipe, longest)
    elif transformed():
        return _Transformed.apply((recipe, longest, None), seed, *x)
    tensors = [t for t in (*x, seed) if t is not None]
    if intercepted(tensors):
        for kind, by_rank in BY_RANK.items():
            if any(isinstance(t, kind) for t in tensors):
                return by_rank(x, seed, recipe, longest)
        return OPERATORS.attention(*x[:3], list(x[3:]), seed, recipe.encode(), *longest)
    wants = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    return run(x, seed, (recipe, longest, problem), wants)


def run(x: Tensors, seed: Tensor | None, call: Call, wants: bool) -> tuple[Tensor, Tensor]:
    """Return o and lse of a call that nothing intercepts, differentiable if a gradient is wanted."""
    return _apply_eager(call, seed, *x) if wants else _forward(x, seed, *call)[:2]


def attend_backward(
    x: Tensors, saved: Saved, do: Tensor, dlse: Tensor | None, recipe: Recipe, longest: Longest, wanted: Sequence[bool]
) -> Tensors:
    """Return the gradients of `x` for a forward that returned `saved`, by the operator or at once."""
    refuse_forward_mode(*x, do, dlse)
    tensors = _present((*x, *saved[:3], do, dlse))
    call = recipe, longest, tuple(wanted)
    if intercepted(tensors) and (torch.compiler.is_compiling() or not transformed()):
        return _spread(_by_operator(x, saved, do, dlse, call), False, wanted)
    if transformed() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return _spread(_Gradient.apply(call, do, dlse, *saved[:3], *x), False, wanted)  # type: ignore[arg-type]
    _check_contents(x, recipe, longest)
    return _backward(x, saved, do, dlse, call)


def _check_contents(x: Tensors, recipe: Recipe, longest: Longest) -> None:
    """Check what tensors hold, on a CPU; none of them may be one of a transform's, which hold no numbers."""
    if CHECK or not x[0].is_cuda:
        check_contents(describe(_operands(x), recipe, longest), _operands(x))


def intercepted(tensors: Sequence[Tensor]) -> bool:
    """Tell whether the compiler, a dispatch mode or a tensor subclass needs to see operators.

    This is also true if torch's dispatcher must negate a view such as `z.conj().imag`.
    """
    return (
        torch.compiler.is_compiling()
        or not PLAIN.issuperset(map(type, tensors))
        or tensors[0].is_meta
        or torch._C._len_torch_dispatch_stack() > 0
        or any([t.is_neg() for t in tensors])
    )


def transformed() -> bool:
    """Tell whether one of torch.func's transforms is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def differentiated() -> bool:
    """Tell whether one of torch.func's transforms takes a gradient."""
    levels = torch._C._functorch.get_interpreter_stack() or ()  # type: ignore[attr-defined]
    return any([level.key() == torch._C._functorch.TransformType.Grad for level in levels])  # type: ignore[attr-defined]


differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result: while a graph is traced, its transforms are active."""


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise RuntimeError under forward-mode AD. Without it, register_autograd would silently return zeros."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(NO_FORWARD_MODE)


class ReverseMode(torch.autograd.Function):
    """An autograd.Function whose forward-mode derivative raises that RuntimeError."""

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        raise RuntimeError(NO_FORWARD_MODE)


def _operands(tensors: Tensors) -> Operands:
    q, k, v = tensors[0].unbind(-3) if tensors[1] is None else tensors[:3]
    return Operands(q, k, v, tuple(tensors[3:]))


def _forward(
    tensors: Tensors, seed: Tensor | None, recipe: Recipe, longest: Longest, problem: Problem | None = None
) -> Saved:
    x = _operands(tensors)
    problem = problem or describe(x, recipe, longest)
    if CHECK or not x.q.is_cuda:
        check_contents(problem, x)
    backend = select(problem)
    if COUNTING:
        count_ran(backend.name)
    return backend.forward(problem, x, seed)


def _backward(
    tensors: Tensors,
    saved: Saved,
    do: Tensor | None,
    dlse: Tensor | None,
    call: tuple[Recipe, Longest, tuple[bool, ...]],
) -> Tensors:
    do, dlse = _readable(do), _readable(dlse)
    x = _operands(tensors)
    if saved.o.dtype != x.q.dtype or (do is not None and do.dtype != x.q.dtype):
        saved, do, dlse = _narrowed(x.q, saved, do, dlse)
    problem = describe(x, *call)
    if quantize.eight_bits(problem):
        grads = _backward_of_codes(problem, x, saved, do, dlse, call)
    else:
        grads = select(problem, backward=True).backward(problem, x, saved, do, dlse)
    own = (grads.packed(), None, None) if call[0].packed else grads[:3]
    return *own, *grads.extra


def _narrowed(
    q: Tensor, saved: Saved, do: Tensor | None, dlse: Tensor | None
) -> tuple[Saved, Tensor | None, Tensor | None]:
    """Return o and do in q's type, as kernels read them, where one is in fp32.

    delta = rowsum(do * o) - dlse is taken from the fp32 o and passed on as a gradient of lse, beside o = 0.
    """
    zeros = q.new_zeros(saved.o.shape[-1]).expand(saved.o.shape)
    if do is None:
        return saved._replace(o=zeros), do, dlse
    do = do.to(q.dtype)
    delta = (do.to(saved.lse.dtype) * saved.o).sum(-1).transpose(-1, -2)
    return saved._replace(o=zeros), do, -delta if dlse is None else dlse - delta


def _backward_of_codes(
    p: Problem,
    x: Operands,
    saved: Saved,
    do: Tensor | None,
    dlse: Tensor | None,
    call: tuple[Recipe, Longest, tuple[bool, ...]],
) -> Grads:
    """Run the 16-bit backward on what a forward with 8-bit products saw. Rounding has a gradient of 1.

    The logits of K without its mean have lse less `shift_of`, and rows of dS that sum to dlse: dQ lacks dlse * mean.
    Where the pre-pass turned q and k, dq and dk are turned back.
    """
    codes = quantize.Codes(*saved.kept) if saved.kept else select(p).codes(p, x)
    seen = quantize.dequantized(p, x, codes)
    if p.recipe.packed:
        q, k, v = torch.stack(seen[:3], -3).unbind(-3)
        seen = Operands(q, k, v, x.extra)
    shift = quantize.shift_of(p, x, codes)
    lse = torch.where(saved.lse.isneginf(), saved.lse, saved.lse - shift)
    of_codes = describe(seen, call[0]._replace(precision=None), *call[1:])
    own = saved._replace(lse=lse, kept=())
    grads = select(of_codes, backward=True).backward(of_codes, seen, own, do, dlse)
    if dlse is not None and quantize.smooths(p):
        missing = dlse.transpose(-1, -2)[..., None] * quantize.mean_of_keys(p, x, codes) * p.scale
        grads.q.add_(torch.where(lse.isneginf().transpose(-1, -2)[..., None], 0.0, missing).to(grads.q.dtype))
    if p.recipe.rotary:
        cos, sin = quantize.tables_of(p, x)
        ends = x.extra[-2:] if p.recipe.varlen else (None, None)
        for t, cu in zip((grads.q, grads.k), ends, strict=True):
            t.copy_(OPERATORS.rotary([t], cos, sin, None, cu, 0, p.recipe.rotary == "neighbours", True)[0])
    return grads


def _readable(grad: Tensor | None) -> Tensor | None:
    """Return a gradient of o or lse as kernels can read it: torch's lazily negated views are resolved."""
    if grad is None:
        return None
    if torch._C._functorch.is_legacy_batchedtensor(grad):  # type: ignore[attr-defined]
        raise RuntimeError(
            "tilewise has no rule for autograd's older vmap (is_grads_batched, vectorize=True, check_batched_grad); "
            "use torch.func (vmap of vjp, jacrev), or take one gradient at a time"
        )
    return grad.resolve_neg()


def _present(tensors: Tensors) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _spread(grads: Sequence[Tensor], packed: bool, wanted: Sequence[bool]) -> Tensors:
    """Undo `_present`: put None back for k and v of packed operands, and for extras without a gradient."""
    found = iter(grads)
    return [next(found) if there else None for there in (True, not packed, not packed, *wanted)]


def _by_operator(x: Tensors, saved: Saved, do: Tensor | None, dlse: Tensor | None, call: Any) -> list[Tensor]:
    """Return the gradients that there are, by the operator."""
    (recipe, longest, wanted), (o, lse, seed, _) = call, saved
    text = recipe.encode()
    return OPERATORS.attention_backward(do, dlse, *x[:3], list(x[3:]), seed, o, lse, text, *longest, list(wanted))


def _needed(recipe: Recipe, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what a backward reads of a call's tensors: after 8-bit products, only the shapes of what has codes."""
    if recipe.precision not in EIGHT_BITS or (recipe.precision == "int8" and recipe.packed):
        return tensors
    count = 1 if recipe.packed else 2 if recipe.precision == "int8" else 3
    return [*(t.new_empty(()).expand(t.shape) for t in tensors[:count]), *tensors[count:]]


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for a backward; autograd refuses those made in inference mode, such as a mask's, and gets clones."""
    ctx.save_for_backward(*[t if t is None or not t.is_inference() else t.clone() for t in tensors])


class _Eager(ReverseMode):
    """The eager path: it has no dispatcher between autograd and the back end."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: Tensor | None, *tensors: Tensor) -> Any:
        o, lse, drawn, kept = _forward(tensors, seed, *call)
        ctx.call = call
        _save(ctx, *(_needed(call[0], tensors) if kept else tensors), o, lse, drawn, *kept)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        given, count = ctx.saved_tensors, len(ctx.needs_input_grad) - 2
        tensors, (o, lse, seed, *kept) = given[:count], given[count:]
        recipe, longest = ctx.call[0].of_gradients(), ctx.call[1]
        wanted = tuple(ctx.needs_input_grad[5:])
        if do is None and dlse is None:
            return (None,) * (2 + len(tensors))
        call = recipe, longest, wanted
        if torch.is_grad_enabled() or transformed():  # create_graph=True, or torch.func transforms the gradient
            grads = _Gradient.apply(call, do, dlse, o, lse, seed, *tensors)
            return None, None, *_spread(grads, recipe.packed, wanted)
        return None, None, *_backward(tensors, Saved(o, lse, seed, tuple(kept)), do, dlse, call)


_apply_eager = super(torch.autograd.Function, _Eager).apply  # type: ignore[attr-defined]
"""`_Eager.apply` without its check for torch.func's transforms, which `attend` has done already."""


class _Transformed(_Eager):
    """The same path under torch.func's transforms, which need a separate setup_context and a rule for vmap."""

    @staticmethod
    def forward(call: Call, seed: Tensor | None, *tensors: Tensor) -> Any:  # type: ignore[override]
        return attend(tensors, seed, *call)  # no transform is left, but a dispatch mode may want the operator

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, seed, *tensors = inputs
        ctx.call = call
        _save(ctx, *tensors, *output, seed)
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, seed: Tensor | None, *tensors: Tensor) -> Any:
        return _vmap(info.batch_size, in_dims[2:], in_dims[1], tensors, seed, *call[:2])


_outside_graphs = attend
"""What `attend` calls while a graph is traced in which torch.func takes gradients; see `_leave_graphs`."""


def _leave_graphs(dynamo: Any) -> None:
    """Break such graphs, and let no part of the eager path into others: Dynamo cannot differentiate our operator."""
    global _outside_graphs  # noqa: PLW0603, nothing else names it in a graph
    reason = "torch.func's gradients of attention are computed outside of graphs; leave fullgraph out"
    _outside_graphs = dynamo.disable(attend, reason=reason)
    _Transformed.backward = staticmethod(dynamo.disable(_Eager.backward, reason=reason))


when_imported("torch._dynamo", _leave_graphs)


class _Gradient(ReverseMode):
    """The backward as a function that transforms can see; differentiating it again is an error."""

    @staticmethod
    def forward(call: Any, do: Any, dlse: Any, o: Tensor, lse: Tensor, seed: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        given = tensors, Saved(o, lse, seed), do, dlse, call
        if intercepted(_present((*tensors, o, lse, seed, do, dlse))):
            return tuple(_by_operator(*given))
        _check_contents(tensors, *call[:2])
        return tuple(_present(_backward(*given)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *given: Any) -> Any:
        calls = [pick(given, in_dims[1:], index) for index in range(info.batch_size)]
        grads = [_Gradient.apply(call, *each) for each in calls]
        return tuple(torch.stack(parts) for parts in zip(*grads, strict=True)), (0,) * len(grads[0])


@torch.library.custom_op(f"{NAMESPACE}::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extra: Sequence[Tensor],
    seed: Tensor | None,
    recipe: str,
    max_q: int,
    max_k: int,
) -> tuple[Tensor, Tensor]:
    """Compute o and lse as one operator. `recipe` is encoded text. If k and v are None, q holds all three."""
    return _forward((q, k, v, *extra), seed, Recipe.decode(recipe), (max_q, max_k))[:2]


@torch.library.custom_op(f"{NAMESPACE}::attention_backward", mutates_args=())
def attention_backward_op(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    extra: Sequence[Tensor],
    seed: Tensor | None,
    o: Tensor,
    lse: Tensor,
    recipe: str,
    max_q: int,
    max_k: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Return dq, dk and dv, or dqkv alone; then the gradients of the extras in `wanted`."""
    call = Recipe.decode(recipe), (max_q, max_k), tuple(wanted)
    return _present(_backward((q, k, v, *extra), Saved(o, lse, seed), do, dlse, call))


@attention_op.register_fake
def _(q: Tensor, k: Any, v: Any, extra: Any, seed: Any, recipe: str, max_q: int, max_k: int) -> Any:
    x = _operands((q, k, v, *extra))
    p = describe_fake(x, Recipe.decode(recipe), (max_q, max_k))
    rows = (p.H, q.shape[0]) if p.rows_packed else (p.B, p.H, p.M)
    o = q.new_empty((*x.q.shape[:-1], p.D_v), dtype=p.out_dtype)
    return o, q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@attention_backward_op.register_fake
def _(
    do: Any, dlse: Any, q: Tensor, k: Any, v: Any, extra: Any, seed: Any, o: Any, lse: Any, recipe: str,
    max_q: int, max_k: int, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    learned = [t for t, want in zip(extra, wanted, strict=True) if want]
    own = q.dtype if Recipe.decode(recipe).out_dtype is None else torch.float32
    return [*(t.new_empty(t.shape, dtype=own) for t in _present((q, k, v))), *(t.new_empty(t.shape) for t in learned)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, extra, seed, recipe, max_q, max_k = inputs
    ctx.call = Recipe.decode(recipe).of_gradients().encode(), max_q, max_k
    _save(ctx, q, k, v, *extra, seed, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    q, k, v, *extra, seed, o, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3] or [False] * len(extra)
    if do is None and dlse is None:
        return None, None, None, [None] * len(extra), None, None, None, None
    grads = OPERATORS.attention_backward(do, dlse, q, k, v, extra, seed, o, lse, *ctx.call, list(wanted))
    dq, dk, dv, *learned = _spread(grads, k is None, wanted)
    return dq, dk, dv, learned, None, None, None, None


def refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    """Raise RuntimeError, as the derivative of a gradient."""
    raise RuntimeError(
        "tilewise has no double backward: the gradients of attention cannot be differentiated again; "
        "use torch's math attention (SDPBackend.MATH) where second derivatives are needed"
    )


@torch.library.custom_op(f"{NAMESPACE}::differentiate_again", mutates_args=())
def differentiate_again_op(x: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Raise RuntimeError where a gradient is differentiated: not when a graph with its derivative is made."""
    refuse_double_backward(None)
    return []


@differentiate_again_op.register_fake
def _(x: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in x]


def _setup_again(ctx: Any, inputs: Any, output: Any) -> None:
    do, dlse, q, k, v, extra, _, o, lse, *_ = inputs
    _save(ctx, do, dlse, q, k, v, *extra, o, lse)


def _differentiate_again(ctx: Any, grads: Sequence[Tensor]) -> Any:
    given = ctx.saved_tensors
    found = iter(OPERATORS.differentiate_again(_present(given), _present(grads)))
    do, dlse, q, k, v, *extra, o, lse = [None if t is None else next(found) for t in given]
    return do, dlse, q, k, v, extra, None, o, lse, None, None, None, None if extra else []


attention_op.register_autograd(_differentiate, setup_context=_setup)
attention_backward_op.register_autograd(_differentiate_again, setup_context=_setup_again)


@attention_op.register_vmap
def _(info: Any, in_dims: Any, q: Any, k: Any, v: Any, extra: Any, seed: Any, recipe: str, *longest: int) -> Any:
    dims = (*in_dims[:3], *(in_dims[3] or [None] * len(extra)))
    tensors = q, k, v, *extra
    return _vmap(info.batch_size, dims, in_dims[4], tensors, seed, Recipe.decode(recipe), longest)  # type: ignore[arg-type]


@attention_backward_op.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    calls = [pick(args, in_dims, index) for index in range(info.batch_size)]
    grads = [OPERATORS.attention_backward(*call) for call in calls]
    return [torch.stack(parts) for parts in zip(*grads, strict=True)], [0] * len(grads[0])


def _vmap(
    size: int,
    dims: Sequence[int | None],
    seed_dim: int | None,
    tensors: Tensors,
    seed: Any,
    recipe: Recipe,
    longest: Longest,
) -> Any:
    """Fold the mapped dimension into the batch.

    Packed sequences, a mapped sink or mapped tables of rotary, and dropout, whose mask depends on the batch index, run
    one call at a time.
    """
    mapped = recipe.sink and dims[-1 - recipe.of_layout] is not None
    mapped = mapped or (recipe.rotary and any(dim is not None for dim in dims[-2:]))
    if recipe.layout or mapped or seed is not None:
        calls = [pick((tensors, seed), (dims, seed_dim), index) for index in range(size)]
        outputs = [attend(ts, drawn, recipe, longest) for ts, drawn in calls]
        return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True)), (0, 0)
    batch = tensors[0].shape[0 if dims[0] is None or dims[0] > 0 else 1]
    ranks = (4 + recipe.packed, 4, 4, *batched_ranks(recipe))  # neither is mapped here, so they need no folding
    whole = [_fold(t, dim, rank, size, batch) for t, dim, rank in zip(tensors, dims, ranks, strict=True)]
    o, lse = attend(whole, None, recipe, longest)
    return (o.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def _fold(t: Tensor | None, dim: int | None, rank: int, size: int, batch: int) -> Tensor | None:
    """Fold the mapped dimension into the batch dimension, which a tensor of `rank` dimensions has."""
    if t is None:
        return None
    has_batch = t.ndim - (dim is not None) == rank
    if dim is None and not has_batch:
        return t
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    if not has_batch:
        t = t[(slice(None), *(None,) * (rank - t.ndim + 1))]  # (size, 1, ...)
    return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)


def pick(args: Any, dims: Any, index: int) -> Any:
    """Return the arguments at one index of the mapped dimension, given by `dims`; None means not mapped."""
    if isinstance(dims, (list, tuple)):
        return [pick(a, d, index) for a, d in zip(args, dims, strict=True)]
    return args if dims is None else args.select(dims, index)


def _forward_flops(
    q: Tensor, k: Any, v: Any, extra: Any, seed: Any, recipe: str, max_q: int, max_k: int, **kwargs: Any
) -> int:
    q, k, v, _ = _operands((q, k, v))
    return _pairs(q, k, extra, recipe, (max_q, max_k)) * 2 * (q.shape[-1] + v.shape[-1])


def _backward_flops(
    do: Any, dlse: Any, q: Tensor, k: Any, v: Any, extra: Any, seed: Any, o: Any, lse: Any, recipe: str,
    max_q: int, max_k: int, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    q, k, v, _ = _operands((q, k, v))
    return _pairs(q, k, extra, recipe, (max_q, max_k)) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, extra: Sequence[Tensor], recipe: str, longest: Longest) -> int:
    """Count the entries of all score matrices, ignoring masks.

    Lengths of packed sequences are read, which synchronises with a GPU. Fake tensors hold no lengths, so each of their
    sequences counts as long as the longest. Those in a cache count as long as its capacity.
    """
    *_, M, H, _ = q.shape
    if Recipe.decode(recipe).cached:
        p = describe_fake(Operands(q, k, k, tuple(extra)), Recipe.decode(recipe), longest)
        return q.shape[:-2].numel() * H * p.N
    if not Recipe.decode(recipe).varlen:
        return q.shape[0] * H * M * k.shape[-3]
    ends = extra[-2:]
    if any(cu.is_meta or is_fake(cu) for cu in ends):
        return H * (ends[0].shape[0] - 1) * longest[0] * longest[1]
    rows, keys = (cu.long().diff().clamp(0, most) for cu, most in zip(ends, longest, strict=True))
    return H * int((rows * keys).sum())


def _register_flops(counter: Any) -> None:
    counter.register_flop_formula(OPERATORS.attention, get_raw=True)(_forward_flops)
    counter.register_flop_formula(OPERATORS.attention_backward, get_raw=True)(_backward_flops)


when_imported("torch.utils.flop_counter", _register_flops)
