"""Attention as PyTorch's dispatcher sees it: two operators, their fake kernels, autograd and vmap."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.calls import Call, find, keep
from ..call.check import describe_fake
from ..call.dispatch import CHECK, NAMESPACE, OPERATORS, pick, refuse_double_backward
from ..call.operands import Saved
from ..call.problem import lse_shape
from ..call.recipe import Recipe
from .eager import learn, repeated, run_forward, vmapped
from .gradients import operands_of, present, run_backward, save, spread


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
    tensors = q, k, v, *extra
    key, given = (recipe, max_q, max_k, seed is None), present(tensors)
    if (call := find(key, given)) is not None:
        return run_forward(tensors, seed, call)[:2]
    call = Call(Recipe.decode(recipe), (max_q, max_k))
    found = run_forward(tensors, seed, call)
    if k is not None:
        learn(key, given, tensors, seed, call, both=True)
    return found[:2]


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
    tensors, saved = (q, k, v, *extra), Saved(o, lse, seed)
    call = Recipe.decode(recipe), (max_q, max_k), tuple(wanted)
    if k is None or do is None or dlse is not None:
        return present(run_backward(tensors, saved, do, dlse, call))
    key, given = (recipe, *call[1:], seed is None), present((*tensors, o, lse, seed))
    repeat = find(key, [do, *given])
    grads = repeat and repeat.run(do, given)
    if grads is None:
        grads = run_backward(tensors, saved, do, dlse, call)
        if repeat is None and not CHECK and (repeat := repeated(tensors, saved, do, call)) is not None:
            keep(key, [do, *given], repeat)
    return present(grads)


@attention_op.register_fake
def _(q: Tensor, k: Any, v: Any, extra: Any, seed: Any, recipe: str, max_q: int, max_k: int) -> Any:
    x = operands_of((q, k, v, *extra))
    p = describe_fake(x, Recipe.decode(recipe), (max_q, max_k))
    o = q.new_empty((*x.q.shape[:-1], p.D_v), dtype=p.out_dtype)
    return o, q.new_empty(lse_shape(x.q.shape), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@attention_backward_op.register_fake
def _(
    do: Any, dlse: Any, q: Tensor, k: Any, v: Any, extra: Any, seed: Any, o: Any, lse: Any, recipe: str,
    max_q: int, max_k: int, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    learned = [t for t, want in zip(extra, wanted, strict=True) if want]
    own = q.dtype if Recipe.decode(recipe).out_dtype is None else torch.float32
    return [*(t.new_empty(t.shape, dtype=own) for t in present((q, k, v))), *(t.new_empty(t.shape) for t in learned)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, extra, seed, recipe, max_q, max_k = inputs
    ctx.call = Recipe.decode(recipe).of_gradients().encode(), max_q, max_k
    save(ctx, q, k, v, *extra, seed, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    q, k, v, *extra, seed, o, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3] or [False] * len(extra)
    if do is None and dlse is None:
        return None, None, None, [None] * len(extra), None, None, None, None
    grads = OPERATORS.attention_backward(do, dlse, q, k, v, extra, seed, o, lse, *ctx.call, list(wanted))
    dq, dk, dv, *learned = spread(grads, k is None, wanted)
    return dq, dk, dv, learned, None, None, None, None


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
    save(ctx, do, dlse, q, k, v, *extra, o, lse)


def _differentiate_again(ctx: Any, grads: Sequence[Tensor]) -> Any:
    given = ctx.saved_tensors
    found = iter(OPERATORS.differentiate_again(present(given), present(grads)))
    do, dlse, q, k, v, *extra, o, lse = [None if t is None else next(found) for t in given]
    return do, dlse, q, k, v, extra, None, o, lse, None, None, None, None if extra else []


attention_op.register_autograd(_differentiate, setup_context=_setup)
attention_backward_op.register_autograd(_differentiate_again, setup_context=_setup_again)


@attention_op.register_vmap
def _(info: Any, in_dims: Any, q: Any, k: Any, v: Any, extra: Any, seed: Any, recipe: str, *longest: int) -> Any:
    dims = (*in_dims[:3], *(in_dims[3] or [None] * len(extra)))
    tensors = q, k, v, *extra
    return vmapped(info.batch_size, dims, in_dims[4], tensors, seed, Call(Recipe.decode(recipe), longest))  # type: ignore[arg-type]


@attention_backward_op.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    calls = [pick(args, in_dims, index) for index in range(info.batch_size)]
    grads = [OPERATORS.attention_backward(*call) for call in calls]
    return [torch.stack(parts) for parts in zip(*grads, strict=True)], [0] * len(grads[0])
