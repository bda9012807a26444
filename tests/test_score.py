"""Scores: their values, and that `pull` is the derivative of `apply`, by the logits and by captured tensors."""

import pytest
import torch

import tilewise as tw
from tilewise.program import Entries

B, H, M, N = 2, 3, 4, 6
AT = Entries.of(B, H, M, N)


def logits():
    return torch.randn(B, H, M, N, dtype=torch.float64)


SCORES = {
    "softcap": lambda: tw.SoftCap(1.5),
    "alibi": lambda: tw.Alibi(torch.rand(H)),
    "alibi per batch": lambda: tw.Alibi(torch.rand(B, H, dtype=torch.float64)),
    "bias": lambda: tw.Bias(torch.randn(B, H, M, N, dtype=torch.float64)),
    "bias of a row": lambda: tw.Bias(torch.randn(N, dtype=torch.float64)),
    "bias of a head": lambda: tw.Bias(torch.randn(H, 1, 1, dtype=torch.float64)),
}


def test_softcap_bounds_the_logits_and_leaves_small_ones():
    S = torch.tensor([-1e30, -2.0, 0.0, 1e-4, 1e30], dtype=torch.float64)
    capped = tw.SoftCap(3.0).apply(S, AT)
    assert capped.abs().max() <= 3.0
    torch.testing.assert_close(capped, 3.0 * torch.tanh(S / 3.0))
    assert abs(float(capped[3]) - 1e-4) < 1e-12


def test_alibi_is_the_distance_from_the_aligned_diagonal():
    S = tw.Alibi(torch.tensor([1.0, 0.5, 0.0])).apply(torch.zeros(B, H, M, N), AT)
    assert S[0, 0].tolist() == [[-abs(i + 2 - j) for j in range(N)] for i in range(M)]
    assert torch.equal(S[:, 1], S[:, 0] / 2)
    assert (S[:, 2] == 0).all()


@pytest.mark.parametrize("shape", [(), (N,), (M, 1), (M, N), (H, 1, 1), (B, 1, 1, N), (B, H, M, N)])
def test_bias_is_added_as_it_broadcasts(shape):
    S, bias = logits(), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(tw.Bias(bias).apply(S, AT), S + bias)


@pytest.mark.parametrize("name", SCORES)
def test_pull_is_the_derivative_of_apply(name):
    score, S, dS = SCORES[name](), logits().requires_grad_(), logits()
    (expected,) = torch.autograd.grad(score.apply(S, AT), S, dS)
    torch.testing.assert_close(score.pull(dS, S.detach(), AT, [None] * len(score.captures)), expected)


@pytest.mark.parametrize("shape", [(), (N,), (M, 1), (M, N), (H, 1, 1), (B, 1, 1, N), (B, H, M, N)])
def test_sums_get_the_derivative_by_the_bias(shape):
    bias, S, dS = torch.randn(shape, dtype=torch.float64).requires_grad_(), logits(), logits()
    (expected,) = torch.autograd.grad(tw.Bias(bias).apply(S, AT), bias, dS)
    total = torch.zeros_like(bias)
    assert torch.equal(tw.Bias(bias.detach()).pull(dS, S, AT, [total]), dS)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("name", SCORES)
def test_a_tile_of_a_score_is_read_by_views(name):
    score, S = SCORES[name](), logits()
    whole = score.apply(S, AT)
    sums, total = ([torch.zeros_like(t, dtype=S.dtype) for t in score.tensors] for _ in range(2))
    score.pull(S, S, AT, sums)
    for j in range(0, N, 2):
        at = slice(0, B), slice(0, H), slice(0, M), slice(j, j + 2)
        tile = Entries.at(at, N - M)
        assert torch.equal(score.apply(S[at], tile), whole[at])
        score.pull(S[at], S[at], tile, total)
    torch.testing.assert_close(total, sums)


def test_scores_are_applied_left_to_right():
    q, k, v = (torch.randn(1, 5, H, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(5, 5, dtype=torch.float64)
    S = torch.einsum("bmhd,bnhd->bhmn", q, k) * 8**-0.5
    for order, expected in (
        ((tw.SoftCap(2.0), tw.Bias(bias)), 2 * torch.tanh(S / 2) + bias),
        ((tw.Bias(bias), tw.SoftCap(2.0)), 2 * torch.tanh((S + bias) / 2)),
    ):
        _, lse = tw.attention(q, k, v, score=order, return_lse=True)
        torch.testing.assert_close(lse, torch.logsumexp(expected, -1))


def test_one_score_needs_no_sequence():
    q = torch.randn(1, 5, 2, 8)
    assert torch.equal(tw.attention(q, q, q, score=tw.SoftCap(2.0)), tw.attention(q, q, q, score=[tw.SoftCap(2.0)]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: tw.SoftCap(0.0), ValueError, ["SoftCap", "cap", "0.0", "> 0"]),
        (lambda: tw.SoftCap(-2), ValueError, ["SoftCap", "cap", "-2", "> 0"]),
        (lambda: tw.SoftCap(float("nan")), ValueError, ["SoftCap", "cap", "nan", "finite"]),
        (lambda: tw.SoftCap(float("inf")), ValueError, ["SoftCap", "cap", "inf", "finite"]),
        (lambda: tw.SoftCap(1e39), ValueError, ["SoftCap", "cap", "1e+39", "2^126"]),
        (lambda: tw.SoftCap("50"), TypeError, ["SoftCap", "cap", "'50'", "number"]),
        (lambda: tw.Alibi([1.0]), TypeError, ["Alibi", "slopes", "list", "tensor"]),
        (lambda: tw.Alibi(torch.tensor([1])), TypeError, ["Alibi", "slopes", "int64", "floating"]),
        (lambda: tw.Alibi(torch.tensor(1.0)), ValueError, ["Alibi", "slopes", "()", "(H,) or (B, H)"]),
        (lambda: tw.Bias(torch.ones(2, 2).bool()), TypeError, ["Bias", "bias", "bool", "floating"]),
        (lambda: tw.Bias(torch.ones(1, 1, 1, 2, 2)), ValueError, ["Bias", "bias", "5", "(B, H, M, N)"]),
    ],
)
def test_a_wrong_value_says_what_is_wrong(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []
