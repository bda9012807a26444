"""tilewise.compat.flash_attn.bert_padding: against indexing written out, with gradients."""

import pytest
import torch

from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from tilewise.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    rearrange,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

SHOWN = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("tail", [(5,), (2, 3), ()], ids=str)
def test_index_first_axis(tail):
    x = torch.randn(6, *tail, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4, 2])
    assert torch.equal(index_first_axis(x, indices), x[indices])
    assert torch.autograd.gradcheck(index_first_axis, (x, indices))
    assert torch.autograd.gradcheck(index_first_axis_residual, (x, indices))
    assert torch.equal(index_first_axis_residual(x, indices)[1], x)


@pytest.mark.parametrize("tail", [(5,), (2, 3), ()], ids=str)
def test_index_put_first_axis(tail):
    x = torch.randn(3, *tail, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 2])
    y = index_put_first_axis(x, indices, 6)
    assert y.shape == (6, *tail)
    assert torch.equal(y[indices], x)
    assert not y[[1, 3, 5]].any()
    assert torch.autograd.gradcheck(index_put_first_axis, (x, indices, 6))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32], ids=str)
def test_unpad_and_pad(kind):
    x = torch.randn(4, 4, 2, 3, requires_grad=True)
    packed, indices, cu, longest, used = unpad_input(x, SHOWN.to(kind))
    assert torch.equal(packed, x[SHOWN.bool()])
    assert torch.equal(indices, SHOWN.flatten().nonzero().flatten())
    assert indices.dtype == torch.int64
    assert cu.tolist() == [0, 3, 3, 6, 10]
    assert cu.dtype == used.dtype == torch.int32
    assert used.tolist() == [3, 0, 3, 4]
    assert longest == 4
    assert isinstance(longest, int)
    back = pad_input(packed, indices, 4, 4)
    assert torch.equal(back, x * SHOWN[:, :, None, None])
    back.sum().backward()
    assert torch.equal(x.grad, SHOWN[:, :, None, None].expand_as(x).float())


def test_unpad_keeps_unused_rows():
    x = torch.randn(4, 4, 3)
    unused = torch.zeros_like(SHOWN)
    unused[0, 3] = unused[1, 1] = 1
    packed, indices, cu, longest, used = unpad_input(x, SHOWN, unused)
    kept = (SHOWN + unused).bool()
    assert torch.equal(packed, x[kept])
    assert torch.equal(indices, kept.flatten().nonzero().flatten())
    assert cu.tolist() == [0, 4, 5, 8, 12]
    assert used.tolist() == [3, 0, 3, 4]
    assert longest == 4


def test_unpad_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 1, 0, 2, 0, 0]])
    x = torch.arange(24.0).view(4, 6, 1).requires_grad_()
    packed, indices, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    real = [*range(5), *range(6, 11), *range(12, 18), *range(18, 21)]
    assert indices.tolist() == real
    assert packed.flatten().tolist() == real
    assert cu.tolist() == [0, 2, 5, 8, 10, 16, 17, 19]
    assert cu.dtype == torch.int32
    assert longest == 6
    packed.sum().backward()
    assert x.grad.flatten().nonzero().flatten().tolist() == real


def test_nothing_shown():
    packed, indices, cu, longest, used = unpad_input(torch.randn(0, 4, 3), torch.ones(0, 4))
    assert packed.shape == (0, 3)
    assert (indices.numel(), cu.tolist(), longest, used.numel()) == (0, [0], 0, 0)
    assert pad_input(packed, indices, 2, 4).shape == (2, 4, 3)


def test_packed_attention_equals_padded_attention():
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    shown = torch.arange(6) < torch.tensor([[6], [4]])
    parts = [unpad_input(t, shown) for t in (q, k, v)]
    indices, cu, longest = parts[0][1:4]
    packed = flash_attn_varlen_func(*(part[0] for part in parts), cu, cu, longest, longest, causal=True)
    out = pad_input(packed, indices, 2, 6)
    for b, length in enumerate((6, 4)):
        alone = flash_attn_func(*(t[b : b + 1, :length] for t in (q, k, v)), causal=True)
        torch.testing.assert_close(out[b : b + 1, :length], alone)


def test_narrow_indices_count_too():
    rows, indices = torch.randn(2, 4, requires_grad=True), torch.tensor([3, 1], dtype=torch.int32)
    padded = pad_input(rows, indices, 2, 2)
    assert torch.equal(padded, pad_input(rows, indices.long(), 2, 2))
    assert torch.equal(index_first_axis(padded.flatten(0, 1), indices), rows)
    (gradient,) = torch.autograd.grad((padded * 2.0).sum(), rows)
    assert torch.equal(gradient, torch.full((2, 4), 2.0))


def test_rearrange_is_einops():
    pytest.importorskip("einops", reason="einops is not installed")
    assert torch.equal(rearrange(SHOWN, "(b two) n -> b n two", two=2), SHOWN.view(2, 2, 4).transpose(1, 2))
