"""PyTorch's fused CPU attention, called by its aten operator, which also returns lse and has a backward."""

import torch
from torch import Tensor

from ..call.backend import holding
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem, empty_parts
from .sequences import compute_type

aten = torch.ops.aten


def why_not(p: Problem) -> list[str]:
    """Return what the call needs that PyTorch's kernel lacks; empty if the kernel can run it."""
    r = p.recipe
    causal = r.mask == (("Causal",),) and p.M in (1, p.N)
    return holding({
        "packed sequences": not p.layout.uniform,
        "products in 8 bits": p.products.codes,
        "this mask": bool(r.mask) and not causal,
        "scores": bool(r.score),
        "a sink": r.sink,
        "dropout": r.dropout > 0.0,
        "another head size for v": p.D_v != p.D,
        "results in fp32": p.out_dtype != p.dtype,
        "no queries or keys": 0 in (p.B, p.M, p.N),
        # its bf16 is as slow as fp32; our tiles, with exact bf16 products, are twice as fast
        "bf16 at the speed of bf16": p.dtype == torch.bfloat16,
    })  # fmt: skip


def why_not_backward(p: Problem) -> list[str]:
    """Return the same for its backward."""
    # it sums dq, dk and dv in fp16, once per block and head: the error is 0.3 % at 32k queries, and tiles are no slower
    return [*why_not(p), *["sums in fp16"] * (p.dtype == torch.float16)]


def forward(p: Problem, x: Operands) -> Saved:
    q, k, v = _queries(p, x.q), _heads_first(x.k), _heads_first(x.v)
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, _causal(p), scale=p.scale)
    lse = lse.to(compute_type(p)).nan_to_num(torch.nan, torch.nan, -torch.inf)  # inf - inf is NaN, as in all back ends
    return Saved(_rows(p, o).contiguous(), lse.reshape(p.B, p.H, p.M).contiguous(), None)


def doubtful(saved: Saved) -> bool:
    """Tell whether a row may be wrong: lse is 0 if all its logits are NaN or -inf; in fp16, o is 0 for some NaN."""
    odd = saved.lse == 0.0
    return bool((odd | saved.lse.isnan() if saved.o.dtype == torch.float16 else odd).any())


def backward(p: Problem, x: Operands, saved: Saved, do: Tensor) -> Grads:
    q, o, do = (_queries(p, t) for t in (x.q, saved.o, do))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, _heads_first(x.k), _heads_first(x.v), o, saved.lse.reshape(q.shape[:3]), 0.0, _causal(p), scale=p.scale
    )
    found = _rows(p, dq), dk.transpose(1, 2), dv.transpose(1, 2)
    if p.recipe.packed:  # the kernel allocates three tensors
        dq, dk, dv = (part.copy_(g) for part, g in zip(empty_parts(p, x), found, strict=True))
    else:
        dq, dk, dv = (g.contiguous() for g in found)
    return Grads(dq, dk, dv, ())


def _causal(p: Problem) -> bool:
    """Tell whether the causal mask hides any key: a single query sees all, as it is aligned with the last."""
    return bool(p.recipe.mask) and p.M > 1


def _queries(p: Problem, t: Tensor) -> Tensor:
    """Return a view (B, H, M, D). A single query becomes (B, H_k, G, D), so a group's G heads read its keys once."""
    t = _readable(t)
    return t.unflatten(2, (p.H_k, -1))[:, 0] if p.M == 1 else t.transpose(1, 2)


def _rows(p: Problem, t: Tensor) -> Tensor:
    """Undo `_queries`: return a view (B, M, H, D)."""
    return t.flatten(1, 2)[:, None] if p.M == 1 else t.transpose(1, 2)


def _heads_first(t: Tensor) -> Tensor:
    """Return a view (B, H_k, N, D)."""
    return _readable(t).transpose(1, 2)


def _readable(t: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last stride is 1, which the kernel assumes without a check."""
    return t if t.stride(-1) == 1 else t.contiguous()
