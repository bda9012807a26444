"""attention_backward: the gradients that autograd gives, from o and lse, on every back end that runs here."""

import pytest
import torch

import tilewise as tw

M, N, H, H_K, D, D_V = 20, 36, 4, 2, 8, 16
CU_Q, CU_K = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 7, 20], [0, 16, 33]))


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def bias(*shape):
    return lambda: {"score": tw.Bias(draw(*shape))}


CALLS = {
    "plain": dict,
    "causal": lambda: {"mask": tw.Causal(), "scale": 0.3},
    "a bias": bias(H, M, N),
    "a bias for all batches, then a cap": lambda: {"score": (tw.Bias(draw(1, 1, M, N)), tw.SoftCap(3.0))},
    "a fixed bias": lambda: {"score": (tw.Bias(draw(N).detach()), tw.Alibi(torch.rand(H)))},
    "a sink": lambda: {"sink": draw(H), "mask": tw.Window(5, 0)},
    "a mask with tensors, a bias and a sink": lambda: {
        "mask": tw.Padding(torch.tensor([30, 0])), "score": tw.Bias(draw(2, 1, 1, N)), "sink": draw(H),
    },
    "dropout": lambda: {"dropout": 0.3, "seed": 5},
    "packed": lambda: {"layout": tw.Varlen(CU_Q, CU_K), "mask": tw.Causal(), "sink": draw(H)},
}  # fmt: skip


def operands(options, dtype=torch.float32):
    batch = () if "layout" in options else (2,)
    return (
        draw(*batch, M, H, D, dtype=dtype),
        draw(*batch, N, H_K, D, dtype=dtype),
        draw(*batch, N, H_K, D_V, dtype=dtype),
    )


def learned(options):
    scores = options.get("score", ())
    scores = scores if isinstance(scores, tuple) else (scores,)
    found = [score.bias for score in scores if isinstance(score, tw.Bias) and score.bias.requires_grad]
    return found + ([options["sink"]] if "sink" in options else [])


def both(name, backend, dtype=torch.float32, **gradients):
    """Return what autograd and what attention_backward give; `gradients` says how lse's gradient is passed on."""
    options = CALLS[name]() | {"backend": backend}
    x = operands(options, dtype)
    o, lse = tw.attention(*x, return_lse=True, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    expected = torch.autograd.grad((o, lse), (*x, *learned(options)), (do, dlse))
    o, lse = o.detach(), lse.detach()
    if gradients.get("by_delta"):
        given = {"delta": (do * o).to(lse.dtype).sum(-1).transpose(-1, -2) - dlse}
    else:
        given = {"dlse": dlse}
    with torch.no_grad():
        return expected, tw.attention_backward(do, *x, o, lse, **given, **options)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_delta", [False, True])
def test_gradients_are_autograds(name, backend, by_delta):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    expected, found = both(name, backend, by_delta=by_delta)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        if not by_delta:  # the same kernels on the same numbers
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)


def test_gradients_of_fp64_are_exact_by_delta_too():
    expected, found = both("a sink", "cpu", torch.float64, by_delta=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=1e-13)


def test_without_gradients_of_lse_and_with_grad_enabled_it_is_the_same():
    x = operands({})
    o, lse = tw.attention(*x, mask=tw.Causal(), return_lse=True)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, x, do)
    found = tw.attention_backward(do, *x, o, lse, mask=tw.Causal())
    assert all(map(torch.equal, found, expected))
    with pytest.raises(RuntimeError, match="no double backward"):
        found[0].sum().backward()


def test_parts_of_the_keys_add_up():
    """As in a ring: o and lse of all keys, and gradients of some of them."""
    q, k, v = operands({}, torch.float64)
    o, lse = tw.attention(q, k, v, return_lse=True)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, (q, k, v), do)
    delta = (do * o).sum(-1).transpose(1, 2).detach()
    parts = [
        tw.attention_backward(do, q, k[:, keys], v[:, keys], o, lse, delta=delta)
        for keys in (slice(0, 10), slice(10, None))
    ]
    torch.testing.assert_close(sum(dq for dq, _, _ in parts), expected[0])
    for index in (1, 2):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], 1), expected[index])


def test_o_is_not_read_if_delta_is_given():
    x = operands({})
    o, lse = tw.attention(*x, return_lse=True)
    do = torch.randn_like(o)
    delta = (do * o).sum(-1).transpose(1, 2)
    with torch.no_grad():
        found = [tw.attention_backward(do, *x, some, lse, delta=delta) for some in (o, torch.full_like(o, torch.nan))]
    assert all(map(torch.equal, *found))


def test_compiled_code_and_modes_see_the_operator():
    torch._dynamo.reset()
    x = [t.detach() for t in operands({})]
    table = torch.randn(M, N)
    o, lse = tw.attention(*x, score=tw.Bias(table), return_lse=True)
    do = torch.randn_like(o)

    def gradients(do, q, k, v, o, lse, table):
        return tw.attention_backward(do, q, k, v, o, lse, delta=lse * 2, score=tw.Bias(table))

    given = do, *x, o, lse, table
    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)(*given)
    assert all(map(torch.equal, compiled, gradients(*given)))
    shapes = [t.shape for t in tw.attention_backward(*[t.to("meta") for t in given[:-1]])]
    assert shapes == [t.shape for t in x]


def test_a_gradient_of_zeros_where_a_batch_is_empty():
    q, k = torch.zeros(0, 3, 2, 8), torch.zeros(0, 5, 2, 8)
    o, lse = tw.attention(q, k, k, return_lse=True)
    assert [tuple(t.shape) for t in tw.attention_backward(o, q, k, k, o, lse)] == [
        (0, 3, 2, 8),
        (0, 5, 2, 8),
        (0, 5, 2, 8),
    ]


X = torch.zeros(2, 5, 4, 8)
LSE = torch.zeros(2, 4, 5)
WRONG = {
    "both": ({"dlse": LSE, "delta": LSE}, ["dlse", "delta", "both"]),
    "do of another shape": ({"do": X[:1]}, ["do", "(1, 5, 4, 8)", "(2, 5, 4, 8)"]),
    "o of another type": ({"o": X.half()}, ["o", "float16"]),
    "no tensor": ({"o": None}, ["o", "NoneType"]),
    "lse transposed": ({"lse": LSE.mT}, ["lse", "(2, 5, 4)", "(2, 4, 5)"]),
    "dlse of another type": ({"dlse": LSE.double()}, ["dlse", "float64"]),
    "no seed": ({"dropout": 0.5}, ["seed", "None"]),
    "rank of q": ({"q": X[0]}, ["q", "(5, 4, 8)"]),
}


def attempt(name):
    given = {"do": X, "q": X, "k": X, "v": X, "o": X, "lse": LSE, **WRONG[name][0]}
    return tw.attention_backward(**given)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the words follow
        attempt(name)
    assert all(word in str(caught.value) for word in WRONG[name][1]), caught.value


def test_return_lse_is_no_option():
    with pytest.raises(TypeError, match="must not have return_lse"):
        tw.attention_backward(X, X, X, X, X, LSE, return_lse=True)
