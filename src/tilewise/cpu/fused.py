"""PyTorch's fused CPU kernel, through its aten operator: it also gives lse and the gradients."""

import torch
from torch import Tensor

from ..problem import Grads, Operands, Problem, Saved, empty_parts
from .sequences import compute_type

aten = torch.ops.aten


def why_not(p: Problem) -> list[str]:
    """What PyTorch's kernel does not cover; empty: it covers the call."""
    r = p.recipe
    causal = r.mask == (("Causal",),) and p.M in (1, p.N)
    against = {
        "packed sequences": r.varlen,
        "this mask": bool(r.mask) and not causal,
        "scores": bool(r.score),
        "a sink": r.sink,
        "dropout": r.dropout > 0.0,
        "another head size for v": p.D_v != p.D,
        "no queries or keys": 0 in (p.B, p.M, p.N),
        # its bf16 runs at the speed of fp32; tiles of exact bf16 products run at twice that
        "bf16 at the speed of bf16": p.dtype == torch.bfloat16,
    }
    return [what for what, lacking in against.items() if lacking]


def why_not_backward(p: Problem) -> list[str]:
    """The same of its backward."""
    # it adds up dq, dk and dv in fp16, once a block and a head: 0.3 % off at 32k queries, and no faster than tiles
    return [*why_not(p), *["sums in fp16"] * (p.dtype == torch.float16)]


def forward(p: Problem, x: Operands) -> Saved:
    q, k, v = _queries(p, x.q), _heads_first(x.k), _heads_first(x.v)
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, _causal(p), scale=p.scale)
    lse = lse.to(compute_type(p)).nan_to_num(torch.nan, torch.nan, -torch.inf)  # inf - inf is NaN, as everywhere else
    return Saved(_rows(p, o).contiguous(), lse.reshape(p.B, p.H, p.M).contiguous(), None)


def doubtful(saved: Saved) -> bool:
    """Whether a row may be wrong: lse is 0 where all logits of a row are NaN or -inf; in fp16, o is 0 for some NaN."""
    odd = saved.lse == 0.0
    return bool((odd | saved.lse.isnan() if saved.o.dtype == torch.float16 else odd).any())


def backward(p: Problem, x: Operands, saved: Saved, do: Tensor) -> Grads:
    q, o, do = (_queries(p, t) for t in (x.q, saved.o, do))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, _heads_first(x.k), _heads_first(x.v), o, saved.lse.reshape(q.shape[:3]), 0.0, _causal(p), scale=p.scale
    )
    found = _rows(p, dq), dk.transpose(1, 2), dv.transpose(1, 2)
    if p.recipe.packed:  # the kernel writes into tensors of its own
        dq, dk, dv = (part.copy_(g) for part, g in zip(empty_parts(p, x), found, strict=True))
    else:
        dq, dk, dv = (g.contiguous() for g in found)
    return Grads(dq, dk, dv, ())


def _causal(p: Problem) -> bool:
    """Whether a mask hides anything: one query sees all keys, as it is aligned with the last."""
    return bool(p.recipe.mask) and p.M > 1


def _queries(p: Problem, t: Tensor) -> Tensor:
    """(B, H, M, D). Of one query (B, H_k, G, D): the heads of a group are rows of one head, and read its keys once."""
    t = _readable(t)
    return t.unflatten(2, (p.H_k, -1))[:, 0] if p.M == 1 else t.transpose(1, 2)


def _rows(p: Problem, t: Tensor) -> Tensor:
    """The way back: (B, M, H, D)."""
    return t.flatten(1, 2)[:, None] if p.M == 1 else t.transpose(1, 2)


def _heads_first(t: Tensor) -> Tensor:
    """(B, H_k, N, D)."""
    return _readable(t).transpose(1, 2)


def _readable(t: Tensor) -> Tensor:
    """With the entries of a row side by side, which the kernel takes for granted."""
    return t if t.stride(-1) == 1 else t.contiguous()
