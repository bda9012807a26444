"""Operators for graphs of torch.compile, which hold no messages between pairs of ranks: keys come to queries inside."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.check import check_arguments, describe_fake
from ..call.dispatch import NAMESPACE, OPERATORS
from ..call.operands import Operands
from ..call.recipe import KINDS, Recipe
from ..values.dropout import Dropout
from ..values.masks import Mask, intersect
from ..values.score import Score
from .agree import literal, resolved
from .ring import gradients, results
from .shards import Shards, shards_of, wide

Kept = tuple[Shards, str, Any, Tensor | None]
"""The problem in pieces, the plan, its group, and the sink."""


def in_graph(
    where: str, mask: Mask, score: Sequence[Score], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse by the operator. `where` is what `written` wrote: the plan, and what `shards_of` wants."""
    given = {name: number for name, number in options.items() if name != "seed"}
    x, recipe, _ = check_arguments(q, k, v, mask=intersect(mask.parts), score=score, sink=sink, layout=None, **given)
    seed = Dropout(recipe.dropout).seed(options["seed"], q)
    return OPERATORS.parallel(q, k, v, list(x.extra), seed, recipe.encode(), where)


def rebuilt(
    recipe: Recipe, q: Tensor, extra: Sequence[Tensor], seed: Tensor | None, where: str, wanted: Sequence[bool] = ()
) -> Kept:
    """Return what the text and tensors of an operator describe. A bias that is `wanted` gets a gradient."""
    (group,), plan, N, pieces, own, head, heads = literal(where)
    learned = [*wanted, *[False] * (len(extra) - len(wanted))]
    tensors = iter([t.detach().requires_grad_() if wants else t for t, wants in zip(extra, learned, strict=True)])
    built: list[Any] = [
        KINDS[name].rebuild(tuple(numbers), tuple(next(tensors) for _ in KINDS[name].captures))
        for name, *numbers in recipe.mask + recipe.score
    ]
    count = len(recipe.mask)
    names = "scale", "dropout", "precision", "deterministic", "backend"
    options = {name: getattr(recipe, name) for name in names} | {"seed": seed}
    s = shards_of(plan, N, pieces, own, intersect(tuple(built[:count])), tuple(built[count:]), options, head, heads, q)
    return s, plan, resolved(group), next(tensors) if recipe.sink else None


@torch.library.custom_op(f"{NAMESPACE}::parallel", mutates_args=())
def parallel_op(
    q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], seed: Tensor | None, recipe: str, where: str
) -> tuple[Tensor, Tensor]:
    """Compute o and lse of this rank's rows. `recipe` and `where` are encoded text."""
    with torch.no_grad():
        s, plan, axis, sink = rebuilt(Recipe.decode(recipe), q, extra, seed, where)
        return results(s, plan, axis, q, k, v, sink)


@torch.library.custom_op(f"{NAMESPACE}::parallel_backward", mutates_args=())
def parallel_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], seed: Tensor | None,
    o: Tensor, lse: Tensor, recipe: str, where: str, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return dq, dk and dv; then the gradients of the extras in `wanted`."""
    with torch.no_grad():
        s, plan, axis, sink = rebuilt(Recipe.decode(recipe), q, extra, seed, where, wanted)
        dq, dk, dv, d_sink, *of_biases = gradients(s, plan, axis, q, k, v, sink, o, lse, do, dlse)
    last = [d_sink] if d_sink is not None and wanted[-1] else []
    return [dq, dk, dv, *[t for t in of_biases if t is not None], *last]  # type: ignore[list-item]


@parallel_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, extra: Any, seed: Any, recipe: str, where: str) -> Any:
    B, M, H, _ = q.shape
    plain = Recipe.decode(recipe)._replace(mask=(), score=())
    describe_fake(Operands(q, k, v, tuple(extra[len(extra) - plain.sink :])), plain, (M, k.shape[1]))
    return q.new_empty((B, M, H, v.shape[-1])), q.new_empty((B, H, M), dtype=wide(q.dtype))


@parallel_backward_op.register_fake
def _(
    do: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, extra: Any, seed: Any, o: Any, lse: Any, recipe: str,
    where: str, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    learned = [t for t, want in zip(extra, wanted, strict=True) if want]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, *learned)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, extra, seed, recipe, where = inputs
    ctx.text = recipe, where
    ctx.save_for_backward(q, k, v, *extra, seed, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
    q, k, v, *extra, seed, o, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3] or [False] * len(extra))
    do = torch.zeros_like(o) if do is None else do
    given = do, dlse, q, k, v, extra, seed, o, lse, *ctx.text, wanted
    dq, dk, dv, *learned = OPERATORS.parallel_backward(*given)
    found = iter(learned)
    return dq, dk, dv, [next(found) if want else None for want in wanted], None, None, None


parallel_op.register_autograd(_differentiate, setup_context=_setup)
