"""Tiny random models of transformers, inputs for them, and what comes out of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 95,
}  # fmt: skip
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
CHUNKED = {
    "head_dim": 16, "attention_chunk_size": 6, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
GEMMA4 = {"global_head_dim": 512, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
ENCODER = {**BASE, "num_key_value_heads": None}
PAIR = {"vocab_size": 96, "d_model": 64, "pad_token_id": 0, "eos_token_id": 95, "decoder_start_token_id": 0}
WHISPER = {
    "bos_token_id": 1, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 16,
    "suppress_tokens": None, "begin_suppress_tokens": None, "max_source_positions": 20, "max_target_positions": 40,
}  # fmt: skip
CAUSAL = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**BASE, **MIXED, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**BASE, **MIXED),
    "gemma4": lambda: transformers.Gemma4TextConfig(**BASE, **MIXED, **GEMMA4),
    "gpt_oss": lambda: transformers.GptOssConfig(**BASE, **MIXED, **MOE),
    "phi3": lambda: transformers.Phi3Config(**BASE),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**BASE, **MLA}),
    "llama4": lambda: transformers.Llama4TextConfig(**BASE, **MOE, **CHUNKED),
}
OTHERS = {
    "bert": (lambda: transformers.BertConfig(**ENCODER), transformers.AutoModelForMaskedLM),
    "modernbert": (
        lambda: transformers.ModernBertConfig(
            **ENCODER, local_attention=8, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2
        ),
        transformers.AutoModelForMaskedLM,
    ),
    "t5": (
        lambda: transformers.T5Config(**PAIR, d_kv=16, d_ff=96, num_layers=2, num_heads=4),
        transformers.AutoModelForSeq2SeqLM,
    ),
    "whisper": (lambda: transformers.WhisperConfig(**PAIR, **WHISPER), transformers.AutoModelForSpeechSeq2Seq),
    "vit": (
        lambda: transformers.ViTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=32,
            patch_size=8,
        ),
        transformers.AutoModelForImageClassification,
    ),
}
GENERATE = (*CAUSAL, "t5", "whisper")


def make(name: str, **changes: Any) -> Any:
    """Return the model with eager attention and fixed random weights, in eval mode."""
    configure, auto = OTHERS[name] if name in OTHERS else (CAUSAL[name], transformers.AutoModelForCausalLM)
    config = configure()
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def inputs(name: str, form: str = "right") -> dict[str, Any]:
    """Return a batch of two: padded on the "right" or "left" or not ("none"), or "packed" by position ids."""
    torch.manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids, real = torch.randint(2, 90, (2, 17)), torch.ones(2, 17, dtype=torch.long)
    real[0, {"left": slice(0, 5), "right": slice(-5, None)}.get(form, slice(0, 0))] = 0
    given: dict[str, Any] = {"input_ids": ids * real, "attention_mask": real}
    if name == "whisper":
        given = {"input_features": torch.randn(2, 16, 40)}
    if name in ("t5", "whisper"):
        given["decoder_input_ids"] = ids[:, :9]
    if form == "packed":
        at = torch.cat([torch.arange(8), torch.arange(9)]).expand(2, -1)
        given = {"input_ids": ids, "position_ids": at, "use_cache": False}
    return given


def forward(model: Any, given: dict[str, Any]) -> list[Tensor]:
    """Return the logits of real tokens, and every gradient of a sum of them."""
    model.zero_grad()
    logits = model(**given).logits
    real = given.get("attention_mask")
    seen = logits * real[..., None] if real is not None and real.shape == logits.shape[:2] else logits
    (seen * torch.linspace(-1, 1, seen.numel(), device=seen.device).reshape(seen.shape)).sum().backward()
    return [seen.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def generate(model: Any, given: dict[str, Any], cache: str | None = None, **options: Any) -> list[Tensor]:
    """Return ten greedy tokens, or those of other options."""
    given = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    fixed = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "cache_implementation": cache, **options}
    with torch.no_grad():
        return [model.generate(**given, **fixed)]


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry of each tensor."""
    pairs = zip(got, wanted, strict=True)
    return max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs)


def spawned(model: Any, given: dict[str, Any], wanted: Tensor) -> None:
    """Compare logits in a process that was spawned: transformers there knows of tilewise only after install()."""
    from tilewise.compat.transformers import install

    install()
    with torch.no_grad():
        assert difference([model(**given).logits], [wanted]) < 1e-5
