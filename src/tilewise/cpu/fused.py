"""PyTorch's fused CPU kernel, through its aten operator: it also gives lse and the gradients."""

import torch

from ..problem import Grads, Operands, Problem, Saved, empty_parts

aten = torch.ops.aten


def why_not(p: Problem) -> list[str]:
    """What PyTorch's kernel does not cover; empty: it covers the call."""
    r = p.recipe
    causal_square = r.mask == (("Causal",),) and p.M == p.N
    against = {
        "packed sequences": r.varlen,
        "this mask": bool(r.mask) and not causal_square,
        "scores": bool(r.score),
        "a sink": r.sink,
        "dropout": r.dropout > 0.0,
        "fewer key heads": p.H_k != p.H,
        "another head size for v": p.D_v != p.D,
        "no queries or keys": 0 in (p.B, p.M, p.N),
        # its bf16 runs at the speed of fp32; tiles of exact bf16 products run at twice that
        "bf16 at the speed of bf16": p.dtype == torch.bfloat16,
    }
    return [what for what, lacking in against.items() if lacking]


def forward(p: Problem, x: Operands) -> Saved:
    q, k, v = (_heads_first(t) for t in x[:3])
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, bool(p.recipe.mask), scale=p.scale)
    lse = lse.to(_lse_type(p)).nan_to_num(torch.nan, torch.nan, -torch.inf)  # inf - inf is NaN, as everywhere else
    return Saved(o.transpose(1, 2).contiguous(), lse.contiguous(), None)


def backward(p: Problem, x: Operands, saved: Saved, do: torch.Tensor) -> Grads:
    q, k, v, o, do = (_heads_first(t) for t in (*x[:3], saved.o, do))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, saved.lse, 0.0, bool(p.recipe.mask), scale=p.scale
    )
    found = [g.transpose(1, 2) for g in grads]
    if p.recipe.packed:  # the kernel writes into tensors of its own
        dq, dk, dv = (part.copy_(g) for part, g in zip(empty_parts(p, x), found, strict=True))
    else:
        dq, dk, dv = (g.contiguous() for g in found)
    return Grads(dq, dk, dv, ())


def _heads_first(t: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) with the entries of a row side by side, which the kernel takes for granted."""
    return (t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2)


def _lse_type(p: Problem) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32
