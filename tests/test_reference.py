"""The specification against torch: autograd's gradients, scaled_dot_product_attention, and Philox's known answers."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import tilewise as tw
from tilewise.attention import reference


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


MASKS = {
    "none": lambda: None,
    "causal": tw.Causal,
    "window": lambda: tw.Window(2, 1),
    "dense with an empty row": lambda: tw.Dense(torch.tensor([[1, 0, 1, 1, 0, 1]] * 3 + [[0] * 6]).bool()),
}


def options(name):
    """The keyword arguments of a variant, with tensors that have gradients."""
    return {
        "plain": {},
        "GQA": {},
        "scale": {"scale": 0.3},
        "softcap": {"score": (tw.SoftCap(1.5),)},
        "alibi": {"score": (tw.Alibi(torch.tensor([0.5, 0.25])),)},
        "bias": {"score": (tw.Bias(draw(2, 1, 6).requires_grad_()),)},
        "bias twice, softcap between": {
            "score": (tw.Bias(draw(4, 6).requires_grad_()), tw.SoftCap(2.0), tw.Bias(draw(2, 1, 4, 1).requires_grad_()))
        },
        "sink": {"sink": draw(2).requires_grad_()},
        "dropout": {"dropout": 0.4, "seed": 7},
    }[name]


VARIANTS = ("plain", "GQA", "scale", "softcap", "alibi", "bias", "bias twice, softcap between", "sink", "dropout")


def inputs(variant, D=3, D_v=2):
    return draw(2, 4, 2, D), draw(2, 6, 1 if variant == "GQA" else 2, D), draw(2, 6, 1 if variant == "GQA" else 2, D_v)


class Reference(torch.autograd.Function):
    """The reference's values with the reference's gradients, for gradcheck."""

    @staticmethod
    def forward(ctx, given, q, k, v, *learned):
        ctx.given = given
        ctx.save_for_backward(q, k, v)
        return reference.attention(q, k, v, **given)

    @staticmethod
    def backward(ctx, do, dlse):
        grads = reference.gradients(*ctx.saved_tensors, do, dlse.nan_to_num(), **ctx.given)
        learned = [g for g in (*grads.scores, grads.sink) if g is not None]
        return None, *grads[:3], *learned


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_derivatives(variant, mask):
    given = {"mask": MASKS[mask](), **options(variant)}
    x = [t.requires_grad_() for t in inputs(variant)]
    learned = [t for change in given.get("score", ()) if change.learns for t in change.tensors]
    learned += [given["sink"]] if "sink" in given else []

    def seen_rows(*tensors):
        # the values that finite differences may look at: lse of a row without keys is -inf
        o, lse = Reference.apply(given, *tensors)
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(seen_rows, (*x, *learned))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H_k", [1, 2, 4])
def test_values_are_those_of_scaled_dot_product_attention(causal, H_k):
    q, k, v = draw(2, 9, 4, 8), draw(2, 9, H_k, 8), draw(2, 9, H_k, 5)
    o, lse = reference.attention(q, k, v, mask=tw.Causal() if causal else None)
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(o, expected)
    S = torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(4 // H_k, 2)) * 8**-0.5
    if causal:
        S = S.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(S, -1))


def test_a_mask_and_a_bias_are_those_of_scaled_dot_product_attention():
    q, k, v = draw(2, 5, 2, 8), draw(2, 7, 2, 8), draw(2, 7, 2, 8)
    bias, seen = draw(2, 5, 7), torch.rand(5, 7) < 0.7
    seen[:, 0] = True
    o, _ = reference.attention(q, k, v, mask=tw.Dense(seen), score=(tw.Bias(bias),), scale=0.2)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    joined = bias.masked_fill(~seen, -torch.inf)
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=joined, scale=0.2).transpose(1, 2)
    torch.testing.assert_close(o, expected)


def test_a_sink_is_a_key_with_value_zero():
    q, k, v, sink = draw(1, 4, 1, 3), draw(1, 6, 1, 3), draw(1, 6, 1, 2), draw(1)
    o, lse = reference.attention(q, k, v, sink=sink)
    S = (torch.einsum("bmhd,bnhd->bhmn", q, k) * 3**-0.5)[0, 0]
    joined = torch.cat([S, sink.expand(4, 1)], 1)
    torch.testing.assert_close(o[0, :, 0], torch.softmax(joined, 1)[:, :6] @ v[0, :, 0])
    torch.testing.assert_close(lse[0, 0], torch.logsumexp(joined, 1))


def test_a_row_without_keys_is_zero_and_its_gradients_too():
    q, k, v = draw(1, 5, 1, 3), draw(1, 2, 1, 3), draw(1, 2, 1, 3)
    o, lse = reference.attention(q, k, v, mask=tw.Causal())
    assert (o[:, :3] == 0).all()
    assert lse[0, 0, :3].isneginf().all()
    assert lse[0, 0, 3:].isfinite().all()
    grads = reference.gradients(q, k, v, draw(1, 5, 1, 3), mask=tw.Causal())
    assert (grads.q[:, :3] == 0).all()
    assert all(g.isfinite().all() for g in grads[:3])


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v, do = draw(1, 5, 2, 3), draw(1, 4, 2, 3), draw(1, 4, 2, 3), draw(1, 5, 2, 3)
    sink = torch.full((2,), -torch.inf, dtype=torch.float64)
    with_sink = reference.attention(q, k, v, mask=tw.Causal(), sink=sink)
    without = reference.attention(q, k, v, mask=tw.Causal())
    assert all(torch.equal(a, b) for a, b in zip(with_sink, without, strict=True))
    assert (reference.gradients(q, k, v, do, mask=tw.Causal(), sink=sink).sink == 0).all()


@pytest.mark.parametrize(("B", "M", "N"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_nothing_in_gives_nothing_out(B, M, N):
    q, k, v = draw(B, M, 2, 3), draw(B, N, 2, 3), draw(B, N, 2, 5)
    o, lse = reference.attention(q, k, v, mask=tw.Causal())
    assert o.shape == (B, M, 2, 5)
    assert (o == 0).all()
    assert lse.shape == (B, 2, M)
    assert lse.isneginf().all()
    grads = reference.gradients(q, k, v, torch.ones_like(o), mask=tw.Causal())
    assert all((g == 0).all() for g in grads[:3])
