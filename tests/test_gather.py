"""Gradients of tensors that scores read, on the portable kernels, in the interpreter: against autograd in fp64."""

import math

import pytest
import torch

import tilewise as tw

pytest.importorskip("triton")
B, H, M, N = 2, 2, 20, 36
"""Of rows there is one tile, of keys there are two; `TALL` turns that around."""
TALL = (36, 20)
ULP = torch.finfo(torch.float32).eps
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


def check(make, *given, sizes=(M, N), H_k=1, hidden=None, **options):
    """Compare with fp64, and return the gradients. `make` makes of tensors the scores, ours and plain functions;
    floating tensors learn. For plain torch, a Bias is a function, too."""
    x = operands(*sizes, H_k)
    results = []
    for wide in (True, False):
        leaves = [t.double() if wide and t.is_floating_point() else t.clone() for t in given]
        learned = [t.requires_grad_() for t in leaves if t.is_floating_point()]
        *own, do = [t.double() if wide else t.clone() for t in x]
        own = [t.requires_grad_() for t in own]
        o = plain(own, make(*leaves), hidden) if wide else attend(own, make(*leaves), **options)
        results.append(torch.autograd.grad(o, [*own, *learned], do))
    for n, (true, found) in enumerate(zip(*results, strict=True)):
        assert found.isfinite().all()
        bound = 32 * ULP * float(true.abs().max() + 1) + torch.finfo(found.dtype).eps * true.abs()
        assert ((found - true).abs() <= bound).all(), f"gradient {n}: {float((found - true).abs().max())}"
    return results[1]


def attend(x, scores, **options):
    scores = [score.bias if isinstance(score, AsBias) else score for score in scores]
    return tw.attention(*x, score=scores, backend="triton", **options)


class AsBias:
    """A bias, as a function for plain torch."""

    def __init__(self, bias):
        self.bias = tw.Bias(bias)

    def __call__(self, s, b, h, i, j):
        return s + self.bias.bias


def test_a_head():
    check(lambda slopes, tau: (lambda s, b, h, i, j: s * tau[h] - slopes[h] * abs(i - j),), real(H), real(H))


def test_rows_and_keys():
    rows, columns = real(H, M), real(B, N)
    check(lambda r, c: (lambda s, b, h, i, j: s * r[h, i], lambda s, b, h, i, j: s + c[b, j]), rows, columns)


def table(s, h, i, j, t):
    return s + t[h, i - j + t.shape[1] // 2]


@pytest.mark.parametrize("sizes", [(M, N), TALL])
def test_a_table_of_distances(sizes):
    check(lambda t: (lambda s, b, h, i, j: table(s, h, i, j, t),), real(H, 2 * N), sizes=sizes)


def test_buckets_of_distances_in_a_causal_mask_and_query_groups():
    def bucket(i, j):
        n = (i - j).abs()
        far = 4 + (torch.log(n.clamp(min=1).float() / 4) / math.log(8) * 4).to(torch.int32)
        return torch.where(n < 4, n, far.clamp(max=7)) + torch.where(j > i, 8, 0)

    hidden = torch.arange(N) > torch.arange(M)[:, None] + N - M
    given = {"mask": tw.Causal(), "hidden": hidden, "H_k": 2}
    check(lambda t: (lambda s, b, h, i, j: s + t[h, bucket(i, j)],), real(H, 16), **given)


def test_a_table_that_a_tensor_of_places_indexes_before_a_cap():
    places = torch.randint(0, 5, (B, M, N), generator=DRAW)
    makes = lambda t: (lambda s, b, h, i, j: s + t[h, places[b, i, j]], lambda s, b, h, i, j: 2 * torch.tanh(s / 2))  # noqa: E731
    check(makes, real(H, 5))


def test_one_tensor_is_read_twice_and_others_not_at_all():
    fixed = real(B, N)
    check(lambda t: (lambda s, b, h, i, j: s + t[b, i] * t[b, j] + fixed[b, j],), real(B, N + 3))


BROADCASTS = (B, H, M, N), (1, H, M, N), (B, 1, 1, N), (N,), ()


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_a_bias_of_any_shape(shape):
    tau = real(H)
    check(lambda t: (AsBias(t), lambda s, b, h, i, j: s * tau[h]), real(*shape))


def test_half_precision_is_rounded_once():
    check(lambda t: (lambda s, b, h, i, j: s * t[h, i],), real(H, M, dtype=torch.float16))


@pytest.mark.parametrize("which", ["table", "places"])
def test_deterministic_gradients_repeat(which):
    places = torch.randint(0, 5, (B, M, N), generator=DRAW)
    t, found = real(H, 2 * N), []
    read = {
        "table": lambda t: lambda s, b, h, i, j: table(s, h, i, j, t),
        "places": lambda t: lambda s, b, h, i, j: s + t[h, places[b, i, j]],
    }[which]
    for _ in range(2):
        DRAW.manual_seed(1)
        found.append(check(lambda t: (read(t),), t, deterministic=True)[-1])
    assert torch.equal(*found)


def test_slabs_of_deterministic_sums_add_up(monkeypatch):
    from tilewise.host import gather

    monkeypatch.setattr(gather, "MOST", 1)
    check(lambda t: (lambda s, b, h, i, j: table(s, h, i, j, t),), real(H, 2 * N), deterministic=True)


def test_rows_that_see_nothing_add_nothing():
    t = real(H, 2 * N)
    hidden = (torch.arange(M)[:, None] % 3 == 0).expand(M, N)
    given = {"mask": tw.Dense(~hidden), "hidden": hidden}
    check(lambda t: (lambda s, b, h, i, j: table(s, h, i, j, t),), t, **given)


def test_packed_sequences():
    lengths = [(9, 20), (20, 13)]
    cu = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True)]
    t, rows = real(H, 2 * N), real(H, M)
    q, k, v, do = [x.flatten(0, 1) for x in operands(20, 20)]
    q, do, k, v = q[:29], do[:29], k[:33], v[:33]
    results = []
    for backend in ("cpu", "triton"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, t, rows)]
        *own, a, r = leaves
        score = tw.Score.of(lambda s, b, h, i, j, a, r: table(s * r[h, i], h, i, j, a), a, r)
        o = tw.attention(*own, score=score, layout=tw.Varlen(*cu), backend=backend)
        results.append(torch.autograd.grad(o, leaves, do))
    for true, found in zip(*results, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


def test_a_logit_as_an_index_is_refused():
    t = real(8).requires_grad_()
    o = attend(operands()[:3], [lambda s, b, h, i, j: s + t[(s * 0).long() + j % 8]])
    with pytest.raises(tw.Unsupported, match="the logit s indexes"):
        o.sum().backward()
