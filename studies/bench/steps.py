"""Models whose training step is measured, with random weights in bf16, and the attentions that they are given.

A step is forward, loss and backward. It has no optimizer, whose time no attention changes, and no dropout, so that all
contenders compute the same loss. Sizes are published ones; `small` ones are rehearsed on a CPU.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

OURS, STANDARD, FLEX = "tilewise", "standard", "flex"
SDPA = {
    "sdpa": None,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""SDPA as PyTorch chooses its kernel, and each kernel by name."""
OF_TRANSFORMERS = {STANDARD: "eager", FLEX: "flex_attention", OURS: "tilewise"}
"""Names of attn_implementation; all others are "sdpa"."""
FAST = ("sdpa", "sdpa cudnn", "sdpa flash")
"""SDPA's kernels of calls without a mask or bias."""
CLASSES = 1000
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A model and the batch of its step."""

    name: str
    client: str
    """The package that has it."""
    make: Callable[[bool, str], Module]
    """The model, small or not, with an attention by name. It returns something with a `loss`."""
    batch: int
    length: int
    """Tokens of an entry of the batch, without a decoder's; of an image, patches."""
    peers: tuple[str, ...]
    """PyTorch's attentions that it can have."""
    targets: int = 0
    """Tokens that a decoder writes."""
    image: int = 0
    """Pixels of an image's side; 0: tokens come in."""
    small_image: int = 0

    def size(self, small: bool) -> tuple[int, int]:
        """Return batch and length."""
        return (2, 32) if small and not self.image else (2 if small else self.batch, self.length)

    def inputs(self, small: bool, device: torch.device) -> dict[str, Tensor]:
        """Draw what the model is called with; all contenders get the same."""
        draw, (batch, length) = torch.Generator().manual_seed(0), self.size(small)
        if self.image:
            side = self.small_image if small else self.image
            found = {
                "pixel_values": torch.randn(batch, 3, side, side, generator=draw, dtype=torch.bfloat16),
                "labels": torch.randint(CLASSES, (batch,), generator=draw),
            }
        else:
            ids = torch.randint(2, 256, (batch, length), generator=draw)
            after = min(self.targets, length)
            found = {"input_ids": ids, "labels": ids[:, :after].flip(1) if after else ids}
        return {name: tensor.to(device) for name, tensor in found.items()}


def of_transformers(config: str, head: str, sizes: Fields, fewer: Fields, small: bool, attention: str) -> Module:
    """Make a model of transformers from the names of its configuration and of its AutoModel."""
    import transformers

    from tilewise.compat.transformers import install

    transformers.logging.set_verbosity_error()
    install()
    configured = getattr(transformers, config)(**{**sizes, **(fewer if small else {})})
    make = getattr(transformers, f"AutoModelFor{head}").from_config
    implementation = OF_TRANSFORMERS.get(attention, "sdpa")
    return make(configured, attn_implementation=implementation, dtype=torch.bfloat16)


class Classifier(Module):
    """A model of images, with its loss."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": cross_entropy(self.model(pixel_values).float(), labels)}


def of_timm(name: str, sizes: Fields, fewer: Fields, small: bool, attention: str) -> Module:
    """Make a model of timm. Its Swin calls SDPA where TIMM_FUSED_ATTN is 2, and multiplies matrices by itself else."""
    os.environ["TIMM_FUSED_ATTN"] = "0" if attention == STANDARD else "2"
    timm = importlib.import_module("timm")
    if attention == OURS:
        from tilewise.compat import sdpa

        sdpa.install(devices=("cuda", "cpu"), always=True)
    return Classifier(timm.create_model(name, **{**sizes, **(fewer if small else {})})).bfloat16()


def context(attention: str) -> AbstractContextManager[Any]:
    """Return what a step runs in."""
    backend = SDPA.get(attention)
    return nullcontext() if backend is None else sdpa_kernel(backend)


GPT2: Fields = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
LLAMA: Fields = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 32768, "use_cache": False,
}  # fmt: skip
GPT_OSS: Fields = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "layer_types": ["sliding_attention", "full_attention"], "use_cache": False,
}  # fmt: skip
"""Both kinds of layers of gpt-oss-20b, with as many experts as a token asks: so no rounding changes which it gets."""
BERT: Fields = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5: Fields = {
    "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "d_kv": 64, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
VIT: Fields = {"num_labels": CLASSES}
SWIN: Fields = {"num_classes": CLASSES, "drop_path_rate": 0.0}
SMALL: Fields = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip
FEWER: Fields = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
MIXED: Fields = {**FEWER, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8, "num_hidden_layers": 2}
SMALL_VIT: Fields = {name: SMALL[name] for name in SMALL if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}

MODELS = {
    model.name: model
    for model in (
        Model(
            "GPT-2 124M", "transformers",
            partial(of_transformers, "GPT2Config", "CausalLM", GPT2, {"n_embd": 64, "n_layer": 2, "n_head": 4}),
            16, 1024, FAST,
        ),
        Model(
            "Llama-8B layer, 8k", "transformers", partial(of_transformers, "LlamaConfig", "CausalLM", LLAMA, FEWER),
            1, 8192, (*FAST, FLEX),
        ),
        Model(
            "Llama-8B layer, 32k", "transformers", partial(of_transformers, "LlamaConfig", "CausalLM", LLAMA, FEWER),
            1, 32768, (*FAST, FLEX),
        ),
        Model(
            "gpt-oss layers", "transformers", partial(of_transformers, "GptOssConfig", "CausalLM", GPT_OSS, MIXED),
            1, 4096, (FLEX, STANDARD),
        ),
        Model(
            "ViT-B", "transformers", partial(of_transformers, "ViTConfig", "ImageClassification", VIT, SMALL_VIT),
            64, 197, FAST, image=224, small_image=32,
        ),
        Model(
            "Swin-T", "timm",
            partial(
                of_timm, "swin_tiny_patch4_window7_224", SWIN, {"img_size": 56, "embed_dim": 24, "depths": (1, 1, 1, 1)}
            ),
            64, 3136, (STANDARD, "sdpa", "sdpa efficient"), image=224, small_image=56,
        ),
        Model(
            "BERT-large", "transformers", partial(of_transformers, "BertConfig", "MaskedLM", BERT, SMALL),
            16, 512, FAST,
        ),
        Model(
            "T5-base", "transformers",
            partial(
                of_transformers, "T5Config", "Seq2SeqLM", T5,
                {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 256},
            ),
            16, 512, (STANDARD, "sdpa", "sdpa efficient"), targets=128,
        ),
    )
}  # fmt: skip
"""Every model, by name."""
