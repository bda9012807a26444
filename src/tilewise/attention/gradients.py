"""Gradients of a call, from what its forward saved: by a back end, after 8-bit products by a 16-bit backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.backend import BACKWARD, planned
from ..call.calls import problem_of
from ..call.check import check_contents
from ..call.dispatch import CHECK, OPERATORS
from ..call.operands import Codes, Grads, Operands, Saved
from ..call.problem import Problem
from ..call.recipe import Recipe
from ..quantize import dequantize as quantize
from ..quantize.codes import smooths

Longest = tuple[int, int]
Tensors = Sequence[Any]
"""q, k, v, then every extra operand; if packed, qkv, None, None, then those. Gradients come in the same order."""


def check_given(x: Tensors, recipe: Recipe, longest: Longest) -> None:
    """Check what tensors hold, on a CPU; none of them may be one of a transform's, which hold no numbers."""
    if CHECK or not x[0].is_cuda:
        check_contents(problem_of(operands_of(x), recipe, longest), operands_of(x))


def operands_of(tensors: Tensors) -> Operands:
    """Return a call's tensors as Operands: three views of one tensor if they are packed."""
    q, k, v = tensors[0].unbind(-3) if tensors[1] is None else tensors[:3]
    return Operands(q, k, v, tuple(tensors[3:]))


def run_backward(
    tensors: Tensors,
    saved: Saved,
    do: Tensor | None,
    dlse: Tensor | None,
    call: tuple[Recipe, Longest, tuple[bool, ...]],
) -> Tensors:
    """Run a call's backward on a back end."""
    do, dlse = _readable(do), _readable(dlse)
    x = operands_of(tensors)
    if saved.o.dtype != x.q.dtype or (do is not None and do.dtype != x.q.dtype):
        saved, do, dlse = _narrowed(x.q, saved, do, dlse)
    problem = problem_of(x, *call)
    exact = problem.products.for_backward(problem)
    if exact is problem:
        grads = planned(problem, BACKWARD).run(x, saved, do, dlse)
    else:
        grads = _backward_quantized(problem, x, saved, do, dlse, call)
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


def _backward_quantized(
    p: Problem,
    x: Operands,
    saved: Saved,
    do: Tensor | None,
    dlse: Tensor | None,
    call: tuple[Recipe, Longest, tuple[bool, ...]],
) -> Grads:
    """Run the 16-bit backward on what a forward with 8-bit products saw. Rounding has a gradient of 1.

    The logits of K without its mean have lse less `shift_of`, and rows of dS that sum to dlse: dQ lacks dlse * mean.
    Where the pre-pass rotated q and k, dq and dk are rotated back.
    """
    codes = Codes(*saved.extra) if saved.extra else quantize.codes_of(p, x)
    decoded = quantize.dequantized(p, x, codes)
    if p.recipe.packed:
        q, k, v = torch.stack(decoded[:3], -3).unbind(-3)
        decoded = Operands(q, k, v, x.extra)
    shift = quantize.shift_of(p, x, codes)
    lse = torch.where(saved.lse.isneginf(), saved.lse, saved.lse - shift)
    own = saved._replace(lse=lse, extra=())
    grads = planned(problem_of(decoded, call[0].exact(), *call[1:]), BACKWARD).run(decoded, own, do, dlse)
    if dlse is not None and smooths(p):
        missing = dlse.transpose(-1, -2)[..., None] * quantize.mean_of_keys(p, x, codes) * p.scale
        grads.q.add_(torch.where(lse.isneginf().transpose(-1, -2)[..., None], 0.0, missing).to(grads.q.dtype))
    if (angles := call[0].products_of(x.extra).angles) is not None:
        layout = call[0].layout_of(x.extra)
        for t, cu in ((grads.q, layout.cu_q), (grads.k, layout.cu_k)):
            t.copy_(OPERATORS.rotary([t], angles.cos, angles.sin, None, cu, 0, angles.interleaved, True)[0])
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


def present(tensors: Tensors) -> list[Tensor]:
    """Leave out what is None."""
    return [t for t in tensors if t is not None]


def spread(grads: Sequence[Tensor], packed: bool, wanted: Sequence[bool]) -> Tensors:
    """Undo `present`: put None back for k and v of packed operands, and for extras without a gradient."""
    found = iter(grads)
    return [next(found) if there else None for there in (True, not packed, not packed, *wanted)]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for a backward; autograd refuses those made in inference mode, such as a mask's, and gets clones."""
    ctx.save_for_backward(*[t if t is None or not t.is_inference() else t.clone() for t in tensors])
