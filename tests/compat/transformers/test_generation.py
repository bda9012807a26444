"""Generation: beams, drafts, continuation on both caches, images, and a compiled decoding step."""

import pytest
import torch
from compat.transformers.models import BASE, MIXED, difference, forward, generate, inputs, make, transformers

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # cache, from 5.24 on


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_searches_find_the_same_tokens(name, options):
    model, given = make(name), inputs(name, "left")
    if "prompt_lookup_num_tokens" in options:
        given = {key: value[1:] for key, value in given.items()}
    wanted = generate(model, given, **options)
    model.set_attn_implementation("tilewise")
    assert torch.equal(generate(model, given, **options)[0], wanted[0])


def test_assisted_decoding_finds_the_same_tokens():
    model, assistant = make("llama"), make("llama", num_hidden_layers=1)
    given = {key: value[1:] for key, value in inputs("llama", "none").items()}
    wanted = generate(model, given, assistant_model=assistant)
    for each in (model, assistant):
        each.set_attn_implementation("tilewise")
    assert torch.equal(generate(model, given, assistant_model=assistant)[0], wanted[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "gpt_oss"])
def test_a_chat_goes_on(name, cache):
    """Ten tokens, then seven more on the same cache."""
    model, given = make(name), inputs(name, "left")

    def run():
        kinds = {"dynamic": lambda: transformers.DynamicCache(config=model.config),
                 "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=24)}  # fmt: skip
        past, real = kinds[cache](), given["attention_mask"]
        with torch.no_grad():
            logits = [
                model(given["input_ids"][:, part], attention_mask=real[:, : part.stop], past_key_values=past).logits
                * real[:, part, None]
                for part in (slice(0, 10), slice(10, 17))
            ]
        return logits

    wanted = run()
    model.set_attn_implementation("tilewise")
    assert difference(run(), wanted) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_static_caches_masks_are_values_but_for_one_row(name, monkeypatch):
    """Only a step of one token gets a tensor, which a compiled step wants: (B, 1, 1, N)."""
    from tilewise.compat.transformers import masks

    drawn, draw = [], masks.Request.draw
    monkeypatch.setattr(masks.Request, "draw", lambda self: drawn.append(self.shape) or draw(self))
    model = make(name)
    model.set_attn_implementation("tilewise")
    generate(model, inputs(name, "left"), "static")
    assert drawn
    assert all(shape[2] == 1 for shape in drawn)


@pytest.mark.timeout(300)
def test_a_compiled_step_on_a_static_cache_is_one_graph():
    model, given = make("llama"), inputs("llama", "left")
    wanted = generate(model, given, "static")
    model.set_attn_implementation("tilewise")
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(model.forward, fullgraph=True, backend=count)
    real, past = given["attention_mask"], transformers.StaticCache(config=model.config, max_cache_len=32)
    try:
        with torch.no_grad():
            tokens = model(**given, past_key_values=past).logits[:, -1:].argmax(-1)
            found = [tokens]
            for _ in range(9):
                real = torch.nn.functional.pad(real, (0, 1), value=1)
                whole = torch.nn.functional.pad(real, (0, 32 - real.shape[1]))
                at = real.sum(1, keepdim=True) - 1
                logits = step(input_ids=tokens, attention_mask=whole, past_key_values=past, position_ids=at).logits
                tokens = logits[:, -1:].argmax(-1)
                found.append(tokens)
    finally:
        torch._dynamo.reset()
    assert torch.equal(torch.cat(found, 1), wanted[0][:, -10:])
    assert len(graphs) == 1


def test_image_blocks_are_drawn_with_one_warning(recwarn):
    """Tokens of one image see each other, others are causal: a union, for which there is no value."""
    from tilewise.compat.transformers import view

    view._warned.clear()
    text = transformers.Gemma3TextConfig(**BASE, **MIXED)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=94, boi_token_index=92,
        eoi_token_index=93,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    given = inputs("llama", "left")
    given["input_ids"][:, 8:12] = 94
    given |= {"token_type_ids": (given["input_ids"] == 94).long(), "pixel_values": torch.randn(2, 3, 32, 32)}
    given["mm_token_type_ids"] = given["token_type_ids"]
    wanted = forward(model, given)
    model.set_attn_implementation("tilewise")
    assert difference(forward(model, given), wanted) < 1e-5
    forward(model, given)
    said = [str(warning.message) for warning in recwarn if "mask of transformers" in str(warning.message)]
    assert len(said) == 1, said
    assert "or_masks" in said[0]
