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


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_on_a_static_cache_no_mask_is_drawn(name, side, monkeypatch):
    from tilewise.compat.transformers import masks

    drawn, draw = [], masks.Request.draw
    model = make(name)
    wanted = generate(model, inputs(name, side), "static")
    monkeypatch.setattr(masks.Request, "draw", lambda self: drawn.append(self.shape) or draw(self))
    model.set_attn_implementation("tilewise")
    assert torch.equal(generate(model, inputs(name, side), "static")[0], wanted[0])
    assert not drawn


def test_a_step_with_holes_in_its_padding_is_drawn():
    model, real = make("llama"), torch.ones(2, 12, dtype=torch.long)
    real[1, 3:5] = 0
    given = {**inputs("llama", "none"), "attention_mask": real}
    given["input_ids"] = given["input_ids"][:2, :12]
    wanted = generate(model, given, "static")
    model.set_attn_implementation("tilewise")
    assert torch.equal(generate(model, given, "static")[0], wanted[0])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_steps_whose_masks_generate_has_prepared_are_one_graph(name, side):
    """As generate() compiles them on a GPU: it makes a step's mask, and the graph gets lengths and starts.

    The cache of a sliding layer counts in Python, which costs transformers a second graph.
    """
    model, given = make(name), inputs(name, side)
    wanted = generate(model, given, "static")
    model.set_attn_implementation("tilewise")
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled, plain = torch.compile(model.forward, fullgraph=True, backend=count), model.forward

    def forward(self, *args, **kwargs):
        return (compiled if kwargs["input_ids"].shape[1] == 1 else plain)(*args, **kwargs)

    try:
        model.forward = forward.__get__(model)
        found = generate(model, given, "static")
    finally:
        del model.forward
        torch._dynamo.reset()
    assert torch.equal(found[0], wanted[0])
    assert len(graphs) == (1 if name == "llama" else 2)
    assert not [node for graph in graphs for node in graph.graph.nodes if node.op == "placeholder" and wide(node)]


def wide(node):
    """Whether a graph's input is a bool tensor of four dimensions."""
    value = node.meta["example_value"]
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim == 4


@pytest.mark.timeout(1200)
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


def test_image_blocks_are_not_drawn(recwarn):
    """Tokens of one image see each other, others are causal: a union, which becomes a program."""
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
    assert not [warning for warning in recwarn if "mask of transformers" in str(warning.message)]
