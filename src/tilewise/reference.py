"""Exact attention and its hand-derived gradients in plain torch: the specification.

Everything else in this package is tested against these few lines, and these lines against
`torch.autograd.gradcheck`. Nothing here is tiled, fused or fast. Call it with fp64 tensors to get the truth.

Shapes: q (B, M, H, D), k (B, N, H_k, D), v (B, N, H_k, D_v), H a multiple of H_k; S, P (B, H, M, N).
A mask is any object with `dense(M, N)`, a score any object with `apply`, `pull` and `reduce` (mask.py, score.py).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
HALF = 0xFFFF


class Gradients(NamedTuple):
    """Gradients in the order of the inputs; `scores` has one entry (or None) per score, `sink` is None without one."""

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
    """O = dropout(P) V and L = log(sum(exp S)), with P = exp(S - L); a row that sees nothing gives O = 0, L = -inf.

    Returns o (B, M, H, D_v) and lse (B, H, M), natural log, sink included, before dropout.
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
    """The gradients of sum(o * do) + sum(lse * dlse) with respect to q, k, v, every learnable score, and the sink.

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
    i, j, shift = _indices(q, k)
    d_scores: list[Tensor | None] = []
    for change, S_in in zip(reversed(score), reversed(stages), strict=True):
        d_scores.insert(0, change.reduce(dS))
        dS = change.pull(dS, S_in, i, j, shift)
    dS = dS * (q.shape[-1] ** -0.5 if scale is None else scale)
    dq = torch.einsum("bhmn,bnhd->bmhd", dS, _repeat(k, q))
    dk = torch.einsum("bhmn,bmhd->bnhd", dS, q)
    d_sink = None if sink is None else sink_gradient(sink, L, delta)
    return Gradients(dq, _sum_groups(dk, k), _sum_groups(dv, v), tuple(d_scores), d_sink)


def sink_gradient(sink: Tensor, L: Tensor, delta: Tensor) -> Tensor:
    """The sink is a key with value 0: dS = P_sink * (0 - delta), summed over rows. L, delta (..., H, M), sink (H,)."""
    dS = torch.exp(sink.to(L.dtype)[:, None] - L) * -delta
    dS = dS.masked_fill(L == -torch.inf, 0.0)  # a sink of -inf in a row without keys, or a row that no sequence owns
    return dS.sum(-1).reshape(-1, sink.shape[0]).sum(0)


def dropout_keep(seed: int, row: Tensor, i: Tensor, j: Tensor, dropout: float) -> Tensor:
    """Whether entry (i, j) of score matrix `row` = b * H + h survives; int64 tensors that broadcast together."""
    return dropout_number(seed, row, i, j) >= dropout_threshold(dropout)


def dropout_number(seed: int, row: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The 16 bits that decide about an entry; they depend on (seed, row, i, j) alone.

    Philox-4x32-10 (Salmon et al. 2011) keyed by the seed's low and high 32 bits, with counter (j', i', row, 0): i' is i
    with bit 3 taken out, and j' is j with bits 3, 4 and 5 taken out. Bits 5 and 4 of j choose one of its four words,
    and bit 3 of i and bit 3 of j one of that word's bytes: the number's upper eight bits. The lower eight are the
    exclusive or of all four words in that byte, independent of each of them. So a counter serves sixteen entries: rows
    i and i + 8 of columns j, j + 8, ..., j + 56. A thread of a tensor-core accumulator holds all sixteen.
    """
    words = torch.stack(philox(((j >> 6) << 3 | j & 7, (i >> 4) << 3 | i & 7, row, torch.zeros_like(row)), seed))
    byte = 8 * (2 * (i >> 3 & 1) + (j >> 3 & 1))
    own = words.gather(0, (j >> 4 & 3).expand(words.shape[1:])[None])[0]
    every = words[0] ^ words[1] ^ words[2] ^ words[3]
    return (own >> byte & 0xFF) << 8 | every >> byte & 0xFF


def dropout_threshold(dropout: float) -> int:
    """The 16-bit numbers under this one drop their entry: p 2^16, rounded to nearest, and 65535 at most."""
    return min(round(dropout * 2.0**16), HALF)


def dropout_rescale(dropout: float) -> float:
    """What kept entries are multiplied by: 1 / (1 - p) for the p that 16 bits can give, so that the mean is exact."""
    return 2.0**16 / (2**16 - dropout_threshold(dropout))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10: four 32-bit words, held in int64 tensors, from a 4-word counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(PHILOX_ROUNDS):
        high_0, low_0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high_1, low_1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & WORD, (k1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def _probabilities(q, k, mask, score, scale, sink):
    """The logits that entered each score, then S after all of them and the mask, P and L."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = torch.einsum("bmhd,bnhd->bhmn", q, _repeat(k, q)) * scale
    i, j, shift = _indices(q, k)
    stages = []
    for change in score:
        stages.append(S)
        S = change.apply(S, i, j, shift)
    if mask is not None:
        S = S.masked_fill(~mask.dense(q.shape[1], k.shape[1]).to(S.device), -torch.inf)
    joined = S if sink is None else torch.cat([S, sink[:, None, None].to(S).expand(*S.shape[:3], 1)], -1)
    m = joined.amax(-1, keepdim=True) if joined.shape[-1] else joined.new_full((*joined.shape[:3], 1), -torch.inf)
    m = m.masked_fill(m == -torch.inf, 0.0)  # a row without keys: exp(-inf - 0) = 0
    l = torch.exp(joined - m).sum(-1, keepdim=True)
    L = m + torch.log(l)
    P = torch.exp(S - m) / l.masked_fill(l == 0.0, 1.0)
    return *stages, S, P, L.squeeze(-1)


def _indices(q, k):
    """Row index shifted by N - M (bottom-right aligned), column index, and that shift."""
    M, N = q.shape[1], k.shape[1]
    i = torch.arange(M, device=q.device)[:, None] + (N - M)
    return i, torch.arange(N, device=q.device)[None, :], N - M


def _dropout_factor(shape, dropout, seed, like):
    """Z of the paper: 0 where dropped, `dropout_rescale` where kept; (B, H, M, N), or 1 without dropout."""
    if dropout == 0.0:
        return 1.0
    B, H, M, N = shape
    row = torch.arange(B * H, device=like.device).view(B, H, 1, 1)
    i, j = torch.arange(M, device=like.device)[:, None], torch.arange(N, device=like.device)[None, :]
    return dropout_keep(seed, row, i, j, dropout).to(like.dtype) * dropout_rescale(dropout)


def _repeat(x, q):
    """Each key head serves H / H_k query heads in a row."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _sum_groups(dx, x):
    return dx.unflatten(2, (x.shape[2], -1)).sum(3)


def _multiply(x, multiplier):
    """High and low 32 bits of a 32-bit by 32-bit product; by halves, since 64-bit signed arithmetic would overflow."""
    low = (x & 0xFFFF) * multiplier
    high = (x >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)
