"""Operators for graphs of torch.compile, which hold no messages between pairs of ranks: keys come to queries inside."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.check import check_arguments, describe_fake
from ..call.dispatch import NAMESPACE, OPERATORS
from ..call.operands import Operands
from ..call.recipe import Recipe
from ..values.dropout import Dropout
from ..values.masks import Mask, intersect
from ..values.score import Score
from .agree import read, rebuilt
from .ring import gradients, results
from .shards import Shards, shards_of, wide


def in_graph(
    where: str, mask: Mask, score: Sequence[Score], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o and lse by the operator. `where` is encoded text: what `shards_of` wants first."""
    given = {name: number for name, number in options.items() if name != "seed"}
    x, recipe, _ = check_arguments(q, k, v, mask=intersect(mask.parts), score=score, sink=sink, layout=None, **given)
    seed = Dropout(recipe.dropout).seed(options["seed"], q)
    return OPERATORS.parallel(q, k, v, list(x.extra), seed, recipe.encode(), where)


def described(
    text: str, q: Tensor, extra: Sequence[Tensor], seed: Tensor | None, where: str, wanted: Sequence[bool] = ()
) -> tuple[Shards, Tensor | None]:
    """Return the problem in pieces that an operator's text and tensors describe, and its sink.

    What is `wanted` gets a gradient.
    """
    recipe, ((axis,), *at) = Recipe.decode(text), read(where)
    learned = wanted or [False] * len(extra)
    tensors = iter([t.detach().requires_grad_() if wants else t for t, wants in zip(extra, learned, strict=True)])
    mask, score = intersect(rebuilt(recipe.mask, tensors)), rebuilt(recipe.score, tensors)
    names = "scale", "dropout", "precision", "deterministic", "backend"
    options = {name: getattr(recipe, name) for name in names} | {"seed": seed}
    return shards_of(axis, *at, mask=mask, score=score, options=options, q=q), next(tensors) if recipe.sink else None


@torch.library.custom_op(f"{NAMESPACE}::parallel", mutates_args=())
def parallel_op(
    q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], seed: Tensor | None, recipe: str, where: str
) -> tuple[Tensor, Tensor]:
    """Compute o and lse of this rank's rows. `recipe` and `where` are encoded text."""
    with torch.no_grad():
        s, sink = described(recipe, q, extra, seed, where)
        return results(s, q, k, v, sink)


@torch.library.custom_op(f"{NAMESPACE}::parallel_backward", mutates_args=())
def parallel_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor], seed: Tensor | None,
    o: Tensor, lse: Tensor, recipe: str, where: str, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Return dq, dk and dv; then the gradients of the extras in `wanted`."""
    with torch.no_grad():
        s, sink = described(recipe, q, extra, seed, where, wanted)
        dq, dk, dv, d_sink, *captured = gradients(s, q, k, v, sink, o, lse, do, dlse)
    last = [d_sink] if d_sink is not None and wanted[-1] else []
    return [dq, dk, dv, *[t for t in captured if t is not None], *last]  # type: ignore[list-item]


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
