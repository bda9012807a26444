"""What a layer may ask, and what is refused with a sentence."""

from itertools import pairwise

import pytest
import torch
from compat.transformers.models import forward, inputs, make
from test_messages import FORM, SHORT_FORM

import tilewise as tw
from tilewise.compat.transformers import layer
from tilewise.compat.transformers.layer import attend
from tilewise.compat.transformers.view import MaskView, Values

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
SQUARE = torch.ones(2, 1, 5, 9, dtype=torch.bool).tril(4)


class Layer(torch.nn.Module):
    is_causal = True


def call(mask=SQUARE, q=Q, k=K, **options):
    o, weights = attend(Layer(), q, k, k, mask, **options)
    assert weights is None
    return o


def test_a_layer_without_a_mask_asks_whether_it_is_causal():
    q, k = Q.transpose(1, 2), K.transpose(1, 2)
    for options, mask in (
        ({}, tw.Causal()),
        ({"is_causal": False}, tw.Full()),
        ({"sliding_window": 3}, tw.Causal() & tw.Window(2, None)),
        ({"sliding_window": 3, "is_causal": False}, tw.Window(2, 2)),
    ):
        torch.testing.assert_close(call(None, **options), tw.attention(q, k, k, mask=mask))
    torch.testing.assert_close(call(None, q[:, :1].transpose(1, 2)), tw.attention(q[:, :1], k, k))


def test_tensors_serve_as_masks():
    wanted = call()
    torch.testing.assert_close(call(SQUARE.float().log()), wanted)
    torch.testing.assert_close(call(torch.nn.functional.pad(SQUARE, (0, 3))), wanted)
    torch.testing.assert_close(call(None), wanted)


def packed(cu, view=None):
    """Return the error of packed rows without their longest lengths, beside each sequence by itself."""
    q, k = Q.transpose(0, 1).flatten(1, 2)[None], K.transpose(0, 1).flatten(1, 2)[None, :, :10]
    o = attend(Layer(), q, k, k, view, cu_seq_lens_q=cu, cu_seq_lens_k=cu)[0]
    ends = cu.tolist()
    parts = [tuple(t[:, :, a:b].transpose(1, 2) for t in (q, k)) for a, b in pairwise(ends)]
    alone = [tw.attention(a, b, b, mask=tw.Causal()) for a, b in parts]
    return float((o - torch.cat(alone, 1)).abs().max())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_offsets_of_packed_rows_may_be_written_by_what_autograd_does_not_count(mode):
    with mode():
        cu = torch.tensor([0, 4, 7, 10], dtype=torch.int32)
        assert packed(cu) < 1e-5
        cu.data[1:3] = torch.tensor([1, 2])  # the longest is longer now
        assert packed(cu) < 1e-5


def test_the_layers_of_a_forward_read_the_offsets_once(monkeypatch):
    longest, read, cu = layer._longest, [], torch.tensor([0, 4, 7, 10], dtype=torch.int32)
    monkeypatch.setattr(layer, "_longest", lambda cu, view: longest(cu, view) if view else read.append(cu) or (4, 4))
    for forward_pass in range(2):
        view = MaskView((1, 1, 10, 10), (), lambda _: Values(tw.Causal(), 10, tw.Causal()), lambda: SQUARE, "")
        assert [packed(cu, view) < 1e-5 for _ in range(3)] == [True] * 3
        assert len(read) == forward_pass + 1


def test_types_may_be_mixed():
    mixed = attend(Layer(), Q, K, K.bfloat16(), SQUARE, s_aux=torch.zeros(4).bfloat16())[0]
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), call(s_aux=torch.zeros(4)), atol=2e-2, rtol=2e-2)
    assert call(q=Q.double(), k=K.double(), s_aux=torch.zeros(4).double()).dtype == torch.float64


WRONG = {
    "a tensor that is not known": (lambda: call(sinks=torch.zeros(2, 4, 5, 1)), TypeError, "sinks"),
    "a number that is not known": (lambda: call(attention_chunk=8), TypeError, "attention_chunk"),
    "half of what packed rows need": (lambda: call(cu_seq_lens_q=torch.zeros(2)), TypeError, "cu_seq_lens_q"),
    "weights": (lambda: call(output_attentions=True), tw.Unsupported, "eager"),
    "pages": (lambda: call(cache=object()), tw.Unsupported, "flash_attention_2"),
    "more keys than the mask": (lambda: call(SQUARE[..., :6]), ValueError, r"\(2, 1, 5, 6\)"),
    "a mask that was not prepared": (lambda: call(torch.ones(2, 9)), ValueError, r"\(2, 9\)"),
    "packed rows with a mask": (lambda: call(cu_seq_lens_q=0, cu_seq_lens_k=0), tw.Unsupported, "attention_mask"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_refused_with_a_sentence(name):
    attempt, kind, words = WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        attempt()
    assert (SHORT_FORM if kind is tw.Unsupported else FORM).fullmatch(str(caught.value))


def test_arguments_that_change_nothing_pass():
    call(position_ids=torch.zeros(2, 5), use_cache=True, output_attentions=False, unknown=None, deterministic=True)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss", "t5", "vit", "whisper", "modernbert"])
def test_asking_for_weights_names_eager(name):
    model = make(name)
    model.set_attn_implementation("tilewise")
    with pytest.raises((ValueError, RuntimeError), match="eager"):
        forward(model, inputs(name) | {"output_attentions": True})
