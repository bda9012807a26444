"""8-bit products of a model's layers, with some left out by name."""

import pytest
import torch
from compat.transformers.models import make

import tilewise as tw
from tilewise.compat.transformers import layer, set_precision

IDS = torch.randint(2, 90, (2, 40), generator=torch.Generator().manual_seed(1))
REAL = (torch.arange(40) >= torch.tensor([[0], [7]])).long()


@pytest.fixture
def asked(monkeypatch):
    """The precision and the number of queries of every call."""
    calls = []

    def recorded(q, k, v, **options):
        calls.append((options.get("precision"), q.shape[1]))
        return tw.attention(q, k, v, **options)

    monkeypatch.setattr(layer, "attention", recorded)
    return calls


def made(name="llama"):
    model = make(name).bfloat16()
    model.set_attn_implementation("tilewise")
    return model


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_logits_and_gradients_stay_near(precision, asked):
    model = made()

    def results():
        model.zero_grad()
        logits = model(IDS, attention_mask=REAL, use_cache=False).logits
        logits[REAL.bool()].float().square().mean().backward()
        return [logits[REAL.bool()], *(p.grad.clone() for p in model.parameters())]

    exact = results()
    set_precision(model, precision)
    asked.clear()
    close = results()
    assert {name for name, _ in asked} == {precision}
    assert not torch.equal(close[0], exact[0])
    for a, b in zip(close, exact, strict=True):
        assert (a - b).float().norm() <= 0.1 * b.float().norm()
    set_precision(model, None)
    assert torch.equal(results()[0], exact[0])


@pytest.mark.parametrize(
    ("leave_out", "left"),
    [(("model.layers.0",), [0]), (("model.layers.1.self_attn",), [1]), ("model.layers.*", [0, 1]), (("*.0.*",), [0])],
)
def test_layers_are_left_out_by_name(leave_out, left, asked):
    model = made()
    set_precision(model, "int8", leave_out=leave_out)
    model(IDS, attention_mask=REAL)
    assert [n for n, (name, _) in enumerate(asked) if name is None] == left
    assert len(asked) == 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_steps_of_generation_stay_in_16_bits(cache, asked):
    model = made()
    set_precision(model, "fp8")
    model.generate(IDS, attention_mask=REAL, max_new_tokens=4, pad_token_id=0, cache_implementation=cache)
    assert {name for name, rows in asked if rows > 1} == {"fp8"}
    assert {name for name, rows in asked if rows == 1} == {None}


def test_what_is_refused():
    model = made()
    with pytest.raises(ValueError, match="precision must be None, int8 or fp8, got 'fp4'"):
        set_precision(model, "fp4")
    with pytest.raises(ValueError, match=r"leave_out must have names .*, got 'layers\.7'; write names such as model"):
        set_precision(model, "fp8", leave_out=("layers.7",))
    set_precision(model.float(), "fp8")
    with pytest.raises(ValueError, match="convert q, k and v to fp16 or bf16"):
        model(IDS, attention_mask=REAL)
