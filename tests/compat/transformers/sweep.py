"""Every family of the installed transformers on tilewise, against eager: logits and gradients of tiny random models.

    python tests/compat/transformers/sweep.py               all, into families.json and docs/use/with-transformers.md
    python tests/compat/transformers/sweep.py llama t5      some, printed

A family's default configuration is shrunk by the names of its fields. Causal models get a batch padded on the left,
others on the right. An outcome is one of

    equal                every difference, divided by the largest entry, is below LIMIT
    wrong: ...           it is not
    refused: ...         tilewise raised, with this message
    own attention        no layer asks transformers' attention interface: tilewise has no part in it
    not shrunk: ...      the shrunk model does not run in eager attention either, or is still large
"""

import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

RECORD = Path(__file__).parent / "families.json"
PAGE = Path(__file__).parents[3] / "docs" / "use" / "with-transformers.md"
LIMIT = 1e-4
LARGE = 20_000_000
"""Parameters of a model that is left out: its configuration has sizes under names that are not known here."""
KINDS = {
    "causal": ("CAUSAL_LM", "AutoModelForCausalLM"),
    "masked": ("MASKED_LM", "AutoModelForMaskedLM"),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    "speech": ("SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq"),
    "image": ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification"),
}
VOCABULARY, LENGTH, LAYERS = 96, 17, 2
PRIVATE = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "_attn_implementation")
SIZES = {
    r"max_source_positions": 20,
    r"num_kv_shared_layers": 0,
    r"(.*_)?vocab_size(_per_layer_input)?": VOCABULARY,
    r"hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|d_embed|word_embed_proj_dim|embedding_size|model_dim": 64,
    r"(.*_)?intermediate_size(_mlp|_per_layer)?|(.*_)?ffn_dim|d_ff|n_inner|d_inner|ffn_hidden_size": 96,
    r"(num|n)_(hidden_)?layers?|n_layer|(num_)?(en|de)coder_layers|num_decoder_layers|depth": 2,
    r"(num|n)_(attention_)?heads?|n_head|((en|de)coder|swa|full)(_num)?_attention_heads": 4,
    r"(num|n)_(key_value|kv)_heads?|n_head_kv|num_global_key_value_heads|swa_num_key_value_heads": 2,
    r"(global_|swa_)?(attention_)?head_dim|d_kv|(swa_)?v_head_dim|qk_nope_head_dim|qk_head_dim|attention_head_size": 16,
    r"qk_rope_head_dim|rotary_dim": 8,
    r"(q|kv|o)_lora_rank|index_head_dim|kv_latent_dim": 16,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_local_experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|(moe_)?top_?k_experts|num_selected_experts|experts_per_token": 2,
    r"n_group|topk_group|num_expert_groups?": 1,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"(max|n)_(position_embeddings|positions|source_positions|target_positions|seq_len(gth)?)|n_ctx|seq_length": 128,
    r"(sliding|local_attention)_window(_size)?|attention_chunk_size|local_attention|sliding_window_size": 6,
    r"image_size": 32,
    r"patch_size": 8,
    r"num_mel_bins|feature_size|input_feat_per_channel": 16,
    r"index_n_heads": 2,
    r"index_topk": 64,
}
HINTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides: fields that are None by default, or whose names say too little."""


def small(name: str, value: Any) -> Any:
    """Return a field's small value, or the value as it is."""
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
    if isinstance(value, dict) and "model_type" in value:
        return shrunk(value)
    if isinstance(value, list) and name.endswith("token_id"):
        return [min(each, VOCABULARY - 1) for each in value]
    if isinstance(value, list) and value and size is not None:
        return [size] * LAYERS
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if size is not None:
        return size if value else value
    return min(value, VOCABULARY - 1) if name.endswith("_id") else value


def shrunk(fields: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """Return the fields of a configuration that become smaller; `whole`: and all others."""
    found = {name: small(name, value) for name, value in fields.items() if name not in PRIVATE}
    found = {name: value for name, value in found.items() if whole or value != fields[name]}
    if fields.get("qk_rope_head_dim"):  # then transformers means the rotary part by a head's size
        found["head_dim"] = found.get("qk_rope_head_dim", fields["qk_rope_head_dim"])
    heads = found.get("num_attention_heads")
    if heads and fields.get("num_key_value_heads") in (None, fields["num_attention_heads"]):
        found["num_key_value_heads"] = heads
    return found | HINTS.get(fields.get("model_type", ""), {})


def configurations(make: Any) -> Any:
    """Yield configurations to try: two different layers; what the class makes of two layers; every field."""
    fields = make().to_dict()
    changed = shrunk(fields)
    changed.pop("per_layer_config", None)
    text = fields if "layer_types" in fields else fields.get("text_config") or {}
    if kinds := list(dict.fromkeys(text.get("layer_types") or ()))[:LAYERS]:
        layers = {"layer_types": (kinds * LAYERS)[:LAYERS]}
        yield lambda: make(
            **(changed | layers if text is fields else changed | {"text_config": changed["text_config"] | layers})
        )
    yield lambda: make(**changed)
    yield lambda: make(**changed | {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16})
    yield lambda: make(**{name: value for name, value in shrunk(fields, True).items() if name != "layer_types"})


def inputs(kind: str, config: Any) -> dict[str, Tensor]:
    """Return a padded batch of two."""
    torch.manual_seed(1)
    if kind == "image":
        size = getattr(config, "image_size", 32)
        return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), size, size)}
    ids, real = torch.randint(4, 90, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    real[0, slice(0, 5) if kind == "causal" else slice(-5, None)] = 0
    if kind == "speech":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
        return {"input_features": torch.randn(2, bins, 40), "decoder_input_ids": ids[:, :9]}
    given = {"input_ids": ids * real, "attention_mask": real}
    return given | ({"decoder_input_ids": ids[:, :9]} if kind != "causal" and config.is_encoder_decoder else {})


def forward(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Return logits of real tokens, and every gradient of a sum of them."""
    model.zero_grad()
    logits = model(**given, **({} if "pixel_values" in given else {"use_cache": False})).logits
    real = given.get("attention_mask")
    seen = logits * real[..., None] if real is not None and real.shape == logits.shape[:2] else logits
    (seen * torch.linspace(-1, 1, seen.numel()).reshape(seen.shape)).sum().backward()
    return [seen.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest entries."""
    if len(got) != len(wanted):
        return float("inf")
    pairs = zip(got, wanted, strict=True)
    return max(((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs if b.numel())


def eager(auto: Any, make: Any, kind: str) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
    """Return a tiny model, its inputs and what eager attention gives; raise the first attempt's error if none runs."""
    first: Exception | None = None
    for configure in configurations(make):
        try:
            config = configure()
            with torch.device("meta"):
                count = sum(p.numel() for p in auto.from_config(config, attn_implementation="eager").parameters())
            if count > LARGE:
                raise ValueError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = auto.from_config(config, attn_implementation="eager").float().eval()
            given = inputs(kind, config)
            wanted = forward(model, given)
            if not all(t.isfinite().all() for t in wanted):
                raise ValueError("eager attention gives numbers that are not finite")
            return model, given, wanted
        except Exception as failure:  # noqa: PERF203
            first = first or failure
    assert first is not None
    raise first


def outcome(auto: Any, make: Any, kind: str) -> str:
    """Return what came out of one family."""
    from tilewise.compat.transformers import layer

    try:
        model, given, wanted = eager(auto, make, kind)
    except Exception as failure:
        return f"not shrunk: {type(failure).__name__}: {' '.join(str(failure).split())[:240]}"
    calls = Counter()
    compute = layer.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["layers"] += 1
        return compute(*args, **kwargs)

    layer.attention = counted
    try:
        model.set_attn_implementation("tilewise")
        error = difference(forward(model, given), wanted)
    except Exception as failure:
        return f"refused: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    finally:
        layer.attention = compute
    if not error < LIMIT:
        return f"wrong: {error:.0e}"
    return "equal" if calls["layers"] else "own attention"


def sweep(only: list[str]) -> dict[str, dict[str, str]]:
    """Return the outcome of every family, by kind."""
    import transformers
    from transformers.models.auto import modeling_auto

    from tilewise.compat.transformers import install

    install()
    transformers.logging.set_verbosity_error()
    found: dict[str, dict[str, str]] = {}
    for kind, (mapping, auto) in KINDS.items():
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for family in sorted(names):
            if not only or family in only:
                make = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
                found.setdefault(kind, {})[family] = outcome(getattr(transformers, auto), make, kind)
                print(f"{kind:16} {family:28} {found[kind][family]}", flush=True)
    return found


def mask_times() -> dict[str, float]:
    """Return how many milliseconds the mask of a padded batch of two rows of 4096 tokens takes, the best of ten."""
    import transformers
    from transformers.masking_utils import create_causal_mask

    real, tokens = torch.ones(2, 4096, dtype=torch.int64), torch.zeros(2, 4096, 8)
    real[0, :100] = 0
    best = {}
    for name in ("tilewise", "sdpa", "eager"):
        config, seconds = transformers.LlamaConfig(attn_implementation=name), []
        for _ in range(10):
            start = time.perf_counter()
            mask = create_causal_mask(config, tokens, real, None)
            if name == "tilewise":
                mask.values()
            seconds.append(time.perf_counter() - start)
        best[name] = float(f"{min(seconds) * 1e3:.2g}")
    return best


def write_page(kept: dict[str, Any]) -> str:
    """Return the page with the tables of a kept outcome."""
    columns = ("equal", "refused", "own attention", "not shrunk")
    rows = ["| models | equal | refused | own attention | not compared |", "|---|---:|---:|---:|---:|"] + [
        f"| {kind} | " + " | ".join(str(counts.get(column, 0)) for column in columns) + " |"
        for kind, counts in kept["counts"].items()
    ]
    times = [
        "| mask of 2 x 4096 tokens, padded on the left, on one CPU core | " + " | ".join(kept["mask_ms"]) + " |",
        "|---" + "|---:" * len(kept["mask_ms"]) + "|",
        "| milliseconds | " + " | ".join(f"{number:g}" for number in kept["mask_ms"].values()) + " |",
    ]
    text = PAGE.read_text()
    for name, lines in (("families", rows), ("masks", times)):
        table = f"<!-- {name} -->\n" + "".join(f"{line}\n" for line in lines) + f"<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", table, text, flags=re.DOTALL)
    return text


def main() -> None:
    """Run the sweep, and keep it if it was whole."""
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    only = sys.argv[1:]
    found = sweep(only)
    counts = {
        kind: dict(sorted(Counter(text.partition(":")[0] for text in rows.values()).items()))
        for kind, rows in found.items()
    }
    print(json.dumps(counts, indent=1))
    if not only:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
        kept = {"versions": versions, "counts": counts, "mask_ms": mask_times(), "families": found}
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(write_page(kept))


if __name__ == "__main__":
    main()
