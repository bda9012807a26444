"""transformers with attn_implementation "flash_attention_2", _3, and _4 for sinks: as its eager attention.

Left-padded batches in fp32: logits, gradients, and tokens that generate() chooses; packed sequences as each alone. On a
CPU, its question for a CUDA device is answered with yes.
"""

import torch

from tilewise.compat import install

install("flash_attn", "flash_attn.cute", "flash_attn_interface")

import transformers  # noqa: E402
from transformers import utils  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

if not torch.cuda.is_available():
    import_utils.is_torch_cuda_available = utils.is_torch_cuda_available = lambda: True
from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402

transformers.logging.set_verbosity_error()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SINKS = {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = (
    ("LlamaConfig", {}, 2),
    ("Qwen3Config", {}, 2),
    ("MistralConfig", {"sliding_window": 8}, 2),
    ("MistralConfig", {"sliding_window": 8}, 3),
    ("Gemma2Config", {"sliding_window": 8, "attn_logit_softcapping": 5.0}, 2),
    ("GptOssConfig", SINKS, 4),
)


def build(config, implementation):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval().to(DEVICE)
    assert model.config._attn_implementation == implementation
    assert implementation == "eager" or flash_utils._flash_varlen_fn.__module__.startswith("tilewise.compat.flash_attn")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def run(config, implementation):
    model = build(config, implementation)
    ids = torch.randint(3, 64, (2, 20)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    logits.square().mean().backward()
    wanted = [p.grad for name, p in model.named_parameters() if name.endswith(("k_proj.weight", "sinks"))]
    tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return logits.detach(), wanted, tokens


for name, options, version in MODELS:
    config, flash = getattr(transformers, name)(**{**SMALL, **options}), f"flash_attention_{version}"
    expected, got = run(config, "eager"), run(config, flash)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert expected[1]
    for a, b in zip(got[1], expected[1], strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), (name, a, b)
    assert torch.equal(got[2], expected[2]), name

    ids = torch.randint(3, 64, (1, 20)).to(DEVICE)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None].to(DEVICE)
    packed = build(config, flash)(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = [build(config, "eager")(input_ids=part).logits for part in ids.split([8, 12], 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
    print(name, version, (got[0] - expected[0]).abs().max().item(), expected[0].abs().max().item())
