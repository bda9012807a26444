"""Gradients of tensors that scores read, on the portable kernels, in the interpreter: against autograd in fp64."""

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton")
B, H, M, N = 2, 2, 20, 36
"""Of rows there is one tile, of keys there are two; `TALL` turns that around."""
TALL = (36, 20)
DRAW = torch.Generator().manual_seed(0)


def real(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=DRAW).to(dtype)


def operands(M=M, N=N, H_k=1):
    return [real(B, M, H, 16), real(B, N, H_k, 16), real(B, N, H_k, 16), real(B, M, H, 16)]


def plain(x, scores, hidden=None, lengths=None):
    """o in fp64, from scores as functions of (s, b, h, i, j); rows that see nothing give 0."""
    q, k, v = x
    M, N = q.shape[1], k.shape[1]
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[None, :, None, None]
    i, j = torch.arange(M)[:, None], torch.arange(N)[None, :]
    S = torch.einsum("bmhd,bnhd->bhmn", q, k.expand(B, N, H, 16)) / 4
    for score in scores:
        S = score(S, b, h, i, j)
    if hidden is not None:
        S = S.masked_fill(hidden, -1e300)
    P = torch.softmax(S, -1)
    if hidden is not None:
        P = P.masked_fill(hidden, 0.0)
    return torch.einsum("bhmn,bnhd->bmhd", P, v.expand(B, N, H, 16))


def check(make, *given, sizes=(M, N), H_k=1, hidden=None, least=4.0, **options):
    """Compare with fp64. `make` makes of tensors the scores, ours and plain functions; floating tensors learn."""
    x = operands(*sizes, H_k)
    results = []
    for kind in (torch.float64, torch.float32):
        leaves = [t.detach().to(kind if t.is_floating_point() and kind is torch.float64 else t.dtype) for t in given]
        learned = [t.requires_grad_() for t in leaves if t.is_floating_point()]
        *own, do = [t.to(kind) for t in x]
        [t.requires_grad_() for t in own]
        if kind is torch.float64:
            o = plain(own, make(*leaves), hidden)
        else:
            scores = [tw.Score.of(fn) if not isinstance(fn, tw.Bias) else fn for fn in make(*leaves)]
            o = tw.attention(*own, score=scores, backend="triton", **options)
        results.append(torch.autograd.grad(o, [*own, *learned], do))
    for n, (true, found) in enumerate(zip(*results, strict=True)):
        ulp = torch.finfo(found.dtype).eps
        bound = 64 * torch.finfo(torch.float32).eps * float(true.abs().max() + 1) + ulp * true.abs()
        assert found.isfinite().all()
        assert ((found - true).abs() <= bound).all(), f"gradient {n}: {float((found - true).abs().max())}"
    return results[1]


def test_a_head():
    check(lambda slopes, tau: (lambda s, b, h, i, j: s * tau[h] - slopes[h] * abs(i - j),), real(H), real(H))


def test_rows_and_keys():
    rows, columns = real(H, M), real(B, N)
    check(lambda r, c: (lambda s, b, h, i, j: s * r[h, i], lambda s, b, h, i, j: s + c[b, j]), rows, columns)


@pytest.mark.parametrize("sizes", [(M, N), TALL])
def test_a_table_of_distances(sizes):
    M, N = sizes
    check(lambda t: (lambda s, b, h, i, j: s + t[h, i - j + N - 1],), real(H, M + N - 1), sizes=sizes)
