"""Masks and scores that are functions, on the portable kernels in Triton's interpreter, against the CPU back end."""

import pytest
import torch
from program.functions import B, H, M, N, examples

import tilewise as tw

pytest.importorskip("triton", reason="Triton is not installed")
EXAMPLES = examples()
CU = [torch.tensor([0, *ends], dtype=torch.int32) for ends in ((7, 7 + M), (11, 11 + N))]


def operands(packed):
    draw = torch.Generator().manual_seed(1)
    rows = (int(CU[0][-1]), int(CU[1][-1])) if packed else (M, N)
    shapes = [(rows[0], H, 16), (rows[1], 1, 16), (rows[1], 1, 16), (rows[0], H, 16)]
    return [torch.randn(shape if packed else (B, *shape), generator=draw) for shape in shapes]


def results(backend, packed, learned, **values):
    """o, lse, and the gradients of q, k, v and of captured tensors that learn."""
    *x, do = operands(packed)
    x = [t.requires_grad_() for t in x]
    layout = tw.Varlen(*CU, M, N) if packed else None
    o, lse = tw.attention(*x, layout=layout, return_lse=True, backend=backend, **values)
    total = (o * do).sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return o, lse, *torch.autograd.grad(total, [*x, *learned])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_function(name, packed):
    example = EXAMPLES[name]
    made = (tw.Mask if example.what == "mask" else tw.Score).of(example.fn, *example.tensors)
    learned = [t for t in example.tensors if t.requires_grad] if example.what == "score" else []
    found, wanted = (results(backend, packed, learned, **{example.what: made}) for backend in ("triton", "cpu"))
    for got, want in zip(found, wanted, strict=True):
        largest = float(want.detach()[want.isfinite()].abs().max())
        torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5 * max(1.0, largest))


@pytest.mark.parametrize("origin", [None, tw.Origin(64, 128)], ids=str)
def test_dropout_draws_the_same_bits_whatever_type_bounds_have(origin):
    """Keys begin and end where 64-bit numbers say."""
    mask = tw.Mask.of(lambda b, h, i, j, lengths: j < lengths[b], torch.tensor([N, 128 + N // 2]))
    options = {"mask": mask, "dropout": 0.3, "seed": 11, "origin": origin}
    for got, want in zip(*(results(backend, False, [], **options) for backend in ("triton", "cpu")), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_rows_whose_keys_a_number_hides_have_gradients(backend):
    """As in plain PyTorch, all keys of such a row have the same P."""

    def hidden(s, b, h, i, j):
        return torch.where(i > 5, s, -1e9)

    found, true = [], []
    for results, dtype, name in ((found, torch.float32, backend), (true, torch.float64, "cpu")):
        made = torch.Generator().manual_seed(0)
        x = [torch.randn(1, 40, 2, 16, generator=made).to(dtype).requires_grad_() for _ in range(3)]
        o = tw.attention(*x, score=hidden, backend=name)
        results += [o, *torch.autograd.grad(o.sin().sum(), x)]
    assert torch.allclose(true[0][:, :6], x[2].mean(1, keepdim=True))
    for got, want in zip(found, true, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
