"""Emulation of the experiment in plain torch: the kernel's steps in fp32, rounded to fp16 where its sums would be."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.call.operands import Operands
from tilewise.call.problem import Problem
from tilewise.program import Entries

from .accumulate import Accumulate

DEPTH = 16
"""Terms that a matrix unit adds before it rounds into an fp16 accumulator."""
COLUMNS = 64
"""Keys of a tile."""
LOG2E = 1.4426950408889634
TINY = 2.0**-126
MARGIN = 2.0**-22
"""The share of its maximum that a row's exponents are lowered by besides, for their rounding."""
LARGEST = torch.finfo(torch.float16).max
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def forward(p: Problem, x: Operands, accumulate: "Accumulate", depth: int = DEPTH, columns: int = COLUMNS) -> Tensor:
    """Compute o from tiles of all queries and some keys."""
    q, k, v = (t.detach().transpose(1, 2).float() for t in x[:3])  # (B, H, M, D), (B, H_k, N, D)
    k, v = (t.repeat_interleave(p.H // p.H_k, 1) for t in (k, v))
    scores, values = TYPES[accumulate.scores], TYPES[accumulate.values]
    c, lower, in_loop = max(p.scale, TINY) * LOG2E, accumulate.lower(p.N), accumulate.division == "in-loop"
    acc = torch.zeros((*q.shape[:-1], p.D_v), dtype=values)
    m = torch.full((*q.shape[:-1], 1), -torch.inf)
    l = torch.zeros_like(m)
    for first, seen in _tiles(p, x, columns):
        k_tile, v_tile = (t[:, :, first : first + columns] for t in (k, v))
        zero = torch.zeros((*q.shape[:-1], k_tile.shape[2]), dtype=scores)
        S = dot(q, k_tile.mT, zero, depth).float().masked_fill(~seen, -torch.inf)
        m_new = torch.maximum(m, S.amax(-1, keepdim=True) * c)
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
        P = exponentials(S * c - (shift + lower + shift.abs() * MARGIN), accumulate.exp2)
        alpha = torch.exp2(m - shift)
        if in_loop:
            l_new = l * alpha + P.float().sum(-1, keepdim=True)
            inverse = torch.where(l_new == 0.0, 0.0, 1.0 / l_new)
            P, factor = P * inverse, l * alpha * inverse
        else:
            factor = alpha.to(values)
            l_new = l * factor + P.float().sum(-1, keepdim=True)
        acc = dot(P.half().float(), v_tile, (acc * factor).to(values), depth)
        m, l = m_new, l_new
    o = acc.float() if in_loop else acc.float() / torch.where(l == 0.0, 1.0, l)
    o = torch.where(o.isfinite(), o.clamp(-LARGEST, LARGEST), o)
    return o.half().transpose(1, 2).contiguous()


def dot(a: Tensor, b: Tensor, acc: Tensor, depth: int) -> Tensor:
    """Return acc + a b in acc's type. In fp16 it is rounded every `depth` terms, in fp32 as torch rounds."""
    if acc.dtype == torch.float32:
        return acc + a @ b
    for first in range(0, a.shape[-1], depth):
        acc = (acc.float() + a[..., first : first + depth] @ b[..., first : first + depth, :]).to(acc.dtype)
    return acc


def exponentials(x: Tensor, kind: str) -> Tensor:
    """Compute exp2 in fp32; in "halves", round the exponent and the result to fp16."""
    return torch.exp2(x) if kind == "fp32" else torch.exp2(x.half().float()).half()


def _tiles(p: Problem, x: Operands, columns: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first key of each tile, and which of its keys each row sees: broadcast to (B, H, M, columns)."""
    mask, _, _ = p.values(x.extra)
    at = Entries.of(p.B, p.H, p.M, p.N)
    for first in range(0, p.N, columns):
        j = at.j[:, first : first + columns]
        seen = torch.ones((1, 1, p.M, j.shape[1]), dtype=torch.bool)
        for part in mask:
            seen = seen & part.keep(at._replace(j=j))
        yield first, seen
