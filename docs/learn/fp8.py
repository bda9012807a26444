"""Attention with 8-bit operands, computed on any machine: numbers are rounded to e4m3, products are not."""

import torch

LARGEST = 448.0
"""What e4m3 holds: a sign, 4 bits of exponent, 3 of mantissa."""


def rounded(X: torch.Tensor, rows: int) -> torch.Tensor:
    """X as e4m3 holds it, with one scale for each block of `rows` rows."""
    blocks = X.unflatten(-2, (-1, rows))
    scale = blocks.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30) / LARGEST
    return ((blocks / scale).to(torch.float8_e4m3fn).to(X.dtype) * scale).flatten(-3, -2)


def rotation(d: int, generator: torch.Generator) -> torch.Tensor:
    """R with R R^T = 1: random signs, then a Hadamard matrix, which mixes every column with every other."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < d:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    signs = torch.randint(0, 2, (d, 1), generator=generator) * 2.0 - 1
    return signs * H / d**0.5


def attention(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, rows: int, R: torch.Tensor | None = None):
    """O from Q, K, V and P in e4m3; R rotates Q and K before they are rounded."""
    Q, K = (Q, K) if R is None else (Q @ R, K @ R)
    S = rounded(Q, rows) @ rounded(K, rows).mT * Q.shape[-1] ** -0.5
    P = torch.exp(S - S.amax(-1, keepdim=True))  # at most 1, so 1 / LARGEST is its scale
    P8 = (P * LARGEST).to(torch.float8_e4m3fn).to(P.dtype) / LARGEST
    return P8 @ rounded(V, rows) / P.sum(-1, keepdim=True)


def with_outliers(*shape: int, size: float, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, and one in a thousand has another of that size added."""
    X, big, rare = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return X + size * big * (rare.abs() > 3.2905)
