"""The eager path of attention: back ends at once, or through one autograd.Function.

A call takes one of two paths to a back end; `attend` decides. torch.compile, torch.export, checkpointing policies, vmap
and every dispatch mode see two operators, `tilewise::attention` and `tilewise::attention_backward` (op.py). Plain eager
calls skip the dispatcher. That takes a third of the host time, and it alone can carry the extra tensors that a back
end saves for its backward, because operators have a fixed signature.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call.backend import BACKWARD, FORWARD, planned, select, while_compiling
from ..call.calls import Call, dispatch_modes, keep, plain, problem_of
from ..call.check import check_contents
from ..call.count import COUNTING, count_ran
from ..call.dispatch import (
    BY_RANK,
    CHECK,
    OPERATORS,
    ReverseMode,
    differentiated,
    intercepted,
    pick,
    refuse_double_backward,
    refuse_forward_mode,
    transformed,
)
from ..call.import_hook import when_imported
from ..call.operands import Saved
from ..call.recipe import Recipe, batched_ranks, reads_batch
from .gradients import Longest, Tensors, check_given, operands_of, present, run_backward, save, spread


def attend(x: Tensors, seed: Tensor | None, call: Call, both: bool = True) -> Any:
    """Return o and lse, differentiable, by the operator or the eager path; without `both`, the latter returns o."""
    refuse_forward_mode(*x)
    if is_compiling():
        if differentiated():
            return _outside_graphs(x, seed, call)
    elif transformed():
        return _Transformed.apply(call, seed, *x)
    tensors = [t for t in (*x, seed) if t is not None]
    if intercepted(tensors):
        for kind, by_rank in BY_RANK.items():
            if any(isinstance(t, kind) for t in tensors):
                return by_rank(x, seed, call.recipe, call.longest)
        return OPERATORS.attention(*x[:3], list(x[3:]), seed, call.recipe.encode(), *call.longest)
    call.wants = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    return attend_plain(x, seed, call, both)


def attend_plain(x: Tensors, seed: Tensor | None, call: Call, both: bool = True) -> Any:
    """Return o and lse, or o alone, of a call that nothing intercepts, differentiable if a gradient is wanted."""
    if call.wants:
        repeat = call.forward
        if repeat is not None and repeat.differentiable and not COUNTING and (found := repeat.run(x, seed)) is not None:
            return found[0]
        return _apply_eager(call, seed, both, *x)
    found = run_forward(x, seed, call)
    return found[:2] if both else found[0]


def attend_backward(
    x: Tensors, saved: Saved, do: Tensor, dlse: Tensor | None, recipe: Recipe, longest: Longest, wanted: Sequence[bool]
) -> Tensors:
    """Return the gradients of `x` for a forward that returned `saved`, by the operator or at once."""
    refuse_forward_mode(*x, do, dlse)
    tensors = present((*x, *saved[:3], do, dlse))
    call = recipe, longest, tuple(wanted)
    if intercepted(tensors) and (is_compiling() or not transformed()):
        return spread(_by_operator(x, saved, do, dlse, call), False, wanted)
    if transformed() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return spread(_Gradient.apply(call, do, dlse, *saved[:3], *x), False, wanted)  # type: ignore[arg-type]
    check_given(x, recipe, longest)
    return run_backward(x, saved, do, dlse, call)


def run_forward(tensors: Tensors, seed: Tensor | None, call: Call) -> Saved:
    """Run a call's forward: by repeating what its like have launched, or by a back end, whose checks come first."""
    repeat = call.forward
    if repeat is not None and (found := repeat.run(tensors, seed)) is not None:
        if COUNTING:
            count_ran(repeat.name)
        return found
    x = operands_of(tensors)
    problem = problem_of(x, call.recipe, call.longest)
    if CHECK or not x.q.is_cuda:
        check_contents(problem, x)
    if COUNTING:
        count_ran(select(problem, FORWARD).name)
    plan = planned(problem, FORWARD)
    if not call.wants:
        return plan.run(x, seed)
    with while_compiling(lambda: plan.ahead(tuple([t.requires_grad for t in x.extra]))):
        return plan.run(x, seed)


def learn(key: Any, given: Sequence[Tensor], tensors: Tensors, seed: Tensor | None, call: Call, both: bool) -> None:
    """Keep a call that has run, and how its launches are repeated, for calls that are `given` such tensors."""
    if not plain(given):
        return
    x = operands_of(tensors)
    problem = problem_of(x, call.recipe, call.longest)
    if not (CHECK or (both and problem.target == "cpu")):  # what repeats there leaves lse as PyTorch's kernel gives it
        call.forward = planned(problem, FORWARD).repeat(x, seed)
        if call.forward is not None:
            call.forward.name = select(problem, FORWARD).name
    keep(key, given, call)


def _by_operator(x: Tensors, saved: Saved, do: Tensor | None, dlse: Tensor | None, call: Any) -> list[Tensor]:
    """Return the gradients that there are, by the operator."""
    (recipe, longest, wanted), (o, lse, seed, _) = call, saved
    text = recipe.encode()
    return OPERATORS.attention_backward(do, dlse, *x[:3], list(x[3:]), seed, o, lse, text, *longest, list(wanted))


def _needed(recipe: Recipe, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return what a backward reads of a call's tensors: after 8-bit products, only the shapes of what has codes."""
    count = recipe.products_of(tensors).coded(recipe.packed)
    return [*(t.new_empty(()).expand(t.shape) for t in tensors[:count]), *tensors[count:]]


class _Eager(ReverseMode):
    """The eager path: it has no dispatcher between autograd and the back end. It returns o alone, or o and lse."""

    @staticmethod
    def forward(ctx: Any, call: Call, seed: Tensor | None, both: bool, *tensors: Tensor) -> Any:
        o, lse, _, extra = run_forward(tensors, seed, call)
        ctx.call, own = call, () if seed is None else (seed,)
        if call.forward is not None:  # whose like held no tensors of inference mode
            ctx.save_for_backward(*tensors, o, lse, *own)
        else:
            save(ctx, *(_needed(call.recipe, tensors) if extra else tensors), o, lse, *own, *extra)
        if not both:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:  # type: ignore[override]
        given, call, needed = ctx.saved_tensors, ctx.call, ctx.needs_input_grad
        repeat = call.backward
        if repeat is not None and dlse is None and do is not None and not (torch.is_grad_enabled() or is_compiling()):
            grads = None if dispatch_modes() else repeat.run(do, given)
            if grads is not None:
                return None, None, None, *grads, *[None] * (len(needed) - 3 - len(grads))
        return _differentiated(given, call, needed, do, dlse)


def _differentiated(given: Any, call: Call, needed: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    """Return the gradients of an eager call, by its back end, or by a function that transforms can see."""
    count = len(needed) - 3
    tensors, (o, lse, *rest) = given[:count], given[count:]
    seed, extra = (rest[0], rest[1:]) if call.recipe.dropout else (None, rest)
    if do is None and dlse is None:
        return (None,) * len(needed)
    wanted = tuple(needed[6:])
    of_gradients = call.recipe.of_gradients(), call.longest, wanted
    if torch.is_grad_enabled() or transformed():  # create_graph=True, or torch.func transforms the gradient
        grads = _Gradient.apply(of_gradients, do, dlse, o, lse, seed, *tensors)
        return None, None, None, *spread(grads, call.recipe.packed, wanted)
    saved = Saved(o, lse, seed, tuple(extra))
    grads = run_backward(tensors, saved, do, dlse, of_gradients)
    if call.backward is None and do is not None and dlse is None and not (extra or CHECK):
        call.backward = repeated(tensors, saved, do, of_gradients)
    return None, None, None, *grads


def repeated(tensors: Any, saved: Saved, do: Tensor, call: Any) -> Any:
    """Return how a backward that has run is repeated, or None."""
    if not (saved.o.dtype == tensors[0].dtype == do.dtype and plain((*tensors, saved.o, do))):
        return None
    x = operands_of(tensors)
    problem = problem_of(x, *call)
    return planned(problem, BACKWARD).repeat(x, saved, do)


_apply_eager = super(torch.autograd.Function, _Eager).apply  # type: ignore[attr-defined]
"""`_Eager.apply` without its check for torch.func's transforms, which `attend` has done already."""


class _Transformed(_Eager):
    """The same path under torch.func's transforms, which need a separate setup_context and a rule for vmap."""

    @staticmethod
    def forward(call: Call, seed: Tensor | None, *tensors: Tensor) -> Any:  # type: ignore[override]
        return attend(tensors, seed, call)  # no transform is left, but a dispatch mode may want the operator

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, seed, *tensors = inputs
        ctx.call = call
        save(ctx, *tensors, *output, *(() if seed is None else (seed,)))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        needed = ctx.needs_input_grad
        _, *grads = _differentiated(ctx.saved_tensors, ctx.call, (False, *needed), do, dlse)
        return tuple(grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, seed: Tensor | None, *tensors: Tensor) -> Any:
        return vmapped(info.batch_size, in_dims[2:], in_dims[1], tensors, seed, call)


_outside_graphs = attend
"""What `attend` calls while a graph is traced in which torch.func takes gradients; see `_leave_graphs`."""


def _leave_graphs(dynamo: Any) -> None:
    """Break such graphs, and let no part of the eager path into others: Dynamo cannot differentiate our operator."""
    global _outside_graphs  # noqa: PLW0603, nothing else names it in a graph
    reason = "torch.func's gradients of attention are computed outside of graphs; leave fullgraph out"
    _outside_graphs = dynamo.disable(attend, reason=reason)
    _Transformed.backward = staticmethod(dynamo.disable(_Transformed.backward, reason=reason))


when_imported("torch._dynamo", _leave_graphs)


class _Gradient(ReverseMode):
    """The backward as a function that transforms can see; differentiating it again is an error."""

    @staticmethod
    def forward(call: Any, do: Any, dlse: Any, o: Tensor, lse: Tensor, seed: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        given = tensors, Saved(o, lse, seed), do, dlse, call
        if intercepted(present((*tensors, o, lse, seed, do, dlse))):
            return tuple(_by_operator(*given))
        check_given(tensors, *call[:2])
        return tuple(present(run_backward(*given)))

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


def vmapped(
    size: int,
    dims: Sequence[int | None],
    seed_dim: int | None,
    tensors: Tensors,
    seed: Any,
    call: Call,
) -> Any:
    """Fold the mapped dimension into the batch.

    Packed sequences, mapped tensors without a batch (a sink, what a function captures), functions of the batch index,
    and dropout, whose mask depends on it, run one call at a time.
    """
    recipe = call.recipe
    ranks = (4 + recipe.packed, 4, 4, *batched_ranks(recipe))
    whole = all([dim is None or rank is not None for dim, rank in zip(dims, ranks, strict=False)])
    if not (whole and recipe.uniform and seed is None) or reads_batch(recipe):
        calls = [pick((tensors, seed), (dims, seed_dim), index) for index in range(size)]
        outputs = [attend(ts, drawn, call) for ts, drawn in calls]
        return tuple(torch.stack(parts) for parts in zip(*outputs, strict=True)), (0, 0)
    batch = tensors[0].shape[0 if dims[0] is None or dims[0] > 0 else 1]
    folded = [_fold(t, dim, rank, size, batch) for t, dim, rank in zip(tensors, dims, ranks, strict=True)]
    o, lse = attend(folded, None, call)
    return (o.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def _fold(t: Tensor | None, dim: int | None, rank: int | None, size: int, batch: int) -> Tensor | None:
    """Fold the mapped dimension into the batch dimension, which a tensor of `rank` dimensions has."""
    if t is None or rank is None:
        return t
    has_batch = t.ndim - (dim is not None) == rank
    if dim is None and not has_batch:
        return t
    t = t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
    if not has_batch:
        t = t[(slice(None), *(None,) * (rank - t.ndim + 1))]  # (size, 1, ...)
    return t.expand(size, batch, *t.shape[2:]).flatten(0, 1)
