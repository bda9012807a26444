"""Reference implementation: exact attention and its hand-derived gradients in plain PyTorch.

All kernels are tested against these few lines, and these lines against `torch.autograd.gradcheck`. Nothing
here is tiled, fused or fast. Call it with fp64 tensors for results to compare with.

Shapes: q (B, M, H, D), k (B, N, H_k, D), v (B, N, H_k, D_v), H a multiple of H_k; S, P (B, H, M, N).
A mask is any object with `dense(M, N, B, H)`. A score is any with `apply` and `pull` (values/).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..program import Entries
from ..values.dropout import dropout_keep, dropout_rescale


class Gradients(NamedTuple):
    """Gradients in the order of the inputs. `scores` has one per captured tensor of each score, and None for a score
    that has none or does not learn; `sink` is None without a sink."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: tuple[Tensor | None, ...]
    sink: Tensor | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    score: tuple[Any, ...] = (),
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute O = dropout(P) V and L = log(sum(exp S)), with P = exp(S - L). Without a key, O = 0 and L = -inf.

    Return o (B, M, H, D_v) and lse (B, H, M), natural log, which includes the sink and ignores dropout.
    """
    S, P, L = _probabilities(q, k, mask, score, scale, sink)[-3:]
    Z = _dropout_factor(S.shape, dropout, seed, S)
    return torch.einsum("bhmn,bnhd->bmhd", P * Z, _repeat(v, q)), L


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    mask: Any = None,
    score: tuple[Any, ...] = (),
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> Gradients:
    """Compute the gradients of sum(o * do) + sum(lse * dlse) for q, k, v, every learnable score, and the sink.

    dS = P * (dP - delta), delta = rowsum(dO * O) - dL (Dao et al. 2022, appendix B.4; dL adds the gradient of lse).
    """
    *stages, S, P, L = _probabilities(q, k, mask, score, scale, sink)
    Z = _dropout_factor(S.shape, dropout, seed, S)
    o = torch.einsum("bhmn,bnhd->bmhd", P * Z, _repeat(v, q))
    delta = (do * o).sum(-1).transpose(1, 2)  # (B, H, M)
    if dlse is not None:
        delta = delta - dlse
    dv = torch.einsum("bhmn,bmhd->bnhd", P * Z, do)
    dP = torch.einsum("bmhd,bnhd->bhmn", do, _repeat(v, q)) * Z
    dS = P * (dP - delta[..., None])
    at, d_scores = _entries(q, k), []
    for change, S_in in zip(reversed(score), reversed(stages), strict=True):
        sums = [torch.zeros_like(t, dtype=dS.dtype) for t in change.tensors] if change.learns else []
        dS = change.pull(dS, S_in, at, sums)
        d_scores = [*(sums or [None]), *d_scores]
    dS = dS * (q.shape[-1] ** -0.5 if scale is None else scale)
    dq = torch.einsum("bhmn,bnhd->bmhd", dS, _repeat(k, q))
    dk = torch.einsum("bhmn,bmhd->bnhd", dS, q)
    d_sink = None
    if sink is not None:  # a key with value 0, so dS = P_sink * (0 - delta); a row whose keys and sink are -inf adds 0
        P_sink = torch.exp(sink.to(L.dtype)[:, None] - L).masked_fill(L == -torch.inf, 0.0)  # (B, H, M)
        d_sink = (P_sink * -delta).sum((0, 2))
    return Gradients(dq, _sum_groups(dk, k), _sum_groups(dv, v), tuple(d_scores), d_sink)


def gather(cache: Tensor, b: int, layout: Any) -> Tensor:
    """Return sequence b's keys or values (1, N_b, H_k, size) in a cache whose layout is a `Cached`."""
    _, capacity, _ = layout.extent(cache.shape)
    start, end = int(layout.first_rows()[b]), min(int(layout.lengths[b]), capacity)
    entry, row, _ = layout.locate(b, torch.arange(start, max(start, end), device=cache.device), cache)
    return cache[entry, row][None]


def _probabilities(q, k, mask, score, scale, sink):
    """Return the logits that enter each score, S after all scores and the mask, P and L."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = torch.einsum("bmhd,bnhd->bhmn", q, _repeat(k, q)) * scale
    at, stages = _entries(q, k), []
    for change in score:
        stages.append(S)
        S = change.apply(S, at)
    if mask is not None:
        B, M, H, _ = q.shape
        S = S.masked_fill(~mask.dense(M, k.shape[1], B, H).to(S.device), -torch.inf)
    joined = S if sink is None else torch.cat([S, sink[:, None, None].to(S).expand(*S.shape[:3], 1)], -1)
    m = joined.amax(-1, keepdim=True) if joined.shape[-1] else joined.new_full((*joined.shape[:3], 1), -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) = 0
    l = torch.exp(joined - m).sum(-1, keepdim=True)
    L = m + torch.log(l)
    P = torch.exp(S - m) / l.masked_fill(l == 0.0, 1.0)
    return *stages, S, P, L.squeeze(-1)


def _entries(q, k):
    """Return the indices of all logits."""
    B, M, H, _ = q.shape
    return Entries.of(B, H, M, k.shape[1], q.device)


def _dropout_factor(shape, dropout, seed, like):
    """Return the paper's Z (B, H, M, N): 0 where dropped, else `dropout_rescale`. Without dropout it is 1."""
    if dropout == 0.0:
        return 1.0
    B, H, M, N = shape
    row = torch.arange(B * H, device=like.device).view(B, H, 1, 1)
    i, j = torch.arange(M, device=like.device)[:, None], torch.arange(N, device=like.device)[None, :]
    return dropout_keep(seed, row, i, j, dropout).to(like.dtype) * dropout_rescale(dropout)


def _repeat(x, q):
    """Repeat each key head for its group of H / H_k consecutive query heads."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _sum_groups(dx, x):
    return dx.unflatten(2, (x.shape[2], -1)).sum(3)
