"""Packed sequences: each one is a batch entry."""

import pytest
import torch
from conformance.rule import of_sequence

import tilewise as tw


def ends(*lengths):
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


LENGTHS_Q, LENGTHS_K = (5, 0, 17, 1), (9, 3, 17, 0)


def packed(H=4, H_k=2, D=8):
    T_q, T_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return torch.randn(T_q, H, D), torch.randn(T_k, H_k, D), torch.randn(T_k, H_k, D)


@pytest.mark.parametrize(
    "mask",
    [
        tw.Full(),
        tw.Causal(),
        tw.Window(3, 1),
        tw.Prefix(torch.tensor([4, 2, 5, 0])),
        tw.Padding(torch.tensor([4, 0, 16, 0])),
        tw.Causal() & tw.Padding(torch.tensor([4, 0, 16, 0])),
    ],
    ids=lambda mask: "&".join(part.plain[0] for part in mask.parts) or "Full",
)
def test_each_sequence_is_a_call_of_its_own(mask):
    q, k, v = packed()
    cu_q, cu_k = ends(*LENGTHS_Q), ends(*LENGTHS_K)
    slopes = torch.rand(4)
    o, lse = tw.attention(
        q, k, v, mask=mask, score=tw.Alibi(slopes), layout=tw.Varlen(cu_q, cu_k, 17, 17), return_lse=True
    )
    assert o.shape == q.shape
    assert lse.shape == (4, q.shape[0])
    for b in range(4):
        rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = tw.Full()
        for part in mask.parts:
            own = own & of_sequence(part, b)
        x = (q[rows][None], k[columns][None], v[columns][None])
        alone, alone_lse = tw.attention(*x, mask=own, score=tw.Alibi(slopes), return_lse=True)
        torch.testing.assert_close(o[rows], alone[0])
        torch.testing.assert_close(lse[:, rows], alone_lse[0])


def test_the_longest_lengths_are_read_if_not_given():
    q, k, v = packed()
    layout = tw.Varlen(ends(*LENGTHS_Q), ends(*LENGTHS_K))
    assert layout.longest() == (17, 17)
    given = tw.Varlen(ends(*LENGTHS_Q), ends(*LENGTHS_K), 17, 20)
    assert given.longest() == (17, 20)
    assert torch.equal(tw.attention(q, k, v, layout=layout), tw.attention(q, k, v, layout=given))


def test_dropout_counts_from_the_start_of_each_sequence():
    q, k, v = torch.zeros(20, 2, 4), torch.zeros(20, 2, 4), torch.randn(20, 2, 4)
    o = tw.attention(q, k, v, dropout=0.5, seed=3, layout=tw.Varlen(ends(10, 10), ends(10, 10)))
    batched = tw.attention(*(t.view(2, 10, 2, 4) for t in (q, k, v)), dropout=0.5, seed=3)
    torch.testing.assert_close(o, batched.view(20, 2, 4))


def test_a_gradient_stays_in_its_sequence():
    q, k, v = (t.requires_grad_() for t in packed())
    o = tw.attention(q, k, v, layout=tw.Varlen(ends(*LENGTHS_Q), ends(*LENGTHS_K)))
    grads = torch.autograd.grad(o[5:22].sum(), (q, k, v))  # the third sequence
    assert (grads[0][:5] == 0).all()
    assert (grads[0][22:] == 0).all()
    assert (grads[1][:12] == 0).all()
    assert (grads[2][:12] == 0).all()
    assert (grads[2][12:29] != 0).any()


def test_no_sequence_gives_nothing():
    q = torch.randn(0, 2, 8, requires_grad=True)
    empty = torch.zeros(1, dtype=torch.int32)
    o, lse = tw.attention(q, q, q, layout=tw.Varlen(empty, empty), return_lse=True)
    assert o.shape == (0, 2, 8)
    assert lse.shape == (2, 0)
    o.sum().backward()
    assert q.grad.shape == (0, 2, 8)


def test_rows_that_no_sequence_owns_are_left_out():
    x = [torch.full((20, 2, 8), torch.nan) for _ in range(3)]
    for t in x:
        t[:17] = torch.randn(17, 2, 8)
        t.requires_grad_()
    layout = tw.Varlen(ends(5, 12), ends(5, 12), 12, 12)
    o, lse = tw.attention(*x, mask=tw.Causal(), layout=layout, return_lse=True)
    grads = torch.autograd.grad(o[:17].sum(), x)
    owned = [t.detach()[:17].requires_grad_() for t in x]
    want = tw.attention(*owned, mask=tw.Causal(), layout=layout)
    assert torch.equal(o[:17], want)
    assert (o[17:] == 0).all()
    assert (lse[:, 17:] == -torch.inf).all()
    for grad, wanted in zip(grads, torch.autograd.grad(want.sum(), owned), strict=True):
        assert torch.equal(grad[:17], wanted)
        assert (grad[17:] == 0).all()


CU = torch.tensor([0, 3, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: tw.Varlen([0, 3], CU), TypeError, ["Varlen", "cu_q", "list", "int32"]),
        (lambda: tw.Varlen(CU, CU.long()), TypeError, ["Varlen", "cu_k", "int64", "int32"]),
        (lambda: tw.Varlen(CU[None], CU), ValueError, ["Varlen", "cu_q", "(1, 3)", "(B + 1,)"]),
        (lambda: tw.Varlen(CU[:0], CU), ValueError, ["Varlen", "cu_q", "(0,)", "(B + 1,)"]),
        (lambda: tw.Varlen(CU, CU[:2]), ValueError, ["Varlen", "cu_q", "(3,)", "cu_k", "(2,)"]),
        (lambda: tw.Varlen(CU, CU, 4.0, 4), TypeError, ["Varlen", "max_q", "4.0", "int"]),
        (lambda: tw.Varlen(CU, CU, 4, -4), ValueError, ["Varlen", "max_k", "-4", ">= 0"]),
    ],
)
def test_a_wrong_value_says_what_is_wrong(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []
