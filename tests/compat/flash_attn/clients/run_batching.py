"""transformers' continuous batching with attn_implementation "flash_attention_2" and _3: generate()'s tokens.

Keys lie in pages; on a GPU a step of one token each is flash_attn_with_kvcache with a block table. On a CPU, its
question for a CUDA device is answered with yes.
"""

import torch

from tilewise.compat import install

install("flash_attn", "flash_attn_interface")

import transformers  # noqa: E402
from transformers import utils  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

if not torch.cuda.is_available():
    import_utils.is_torch_cuda_available = utils.is_torch_cuda_available = lambda: True
from transformers.generation.continuous_batching import input_outputs  # noqa: E402

if not torch.cuda.is_available():
    input_outputs.get_available_devices = lambda: ("cpu",)  # else it pins memory

transformers.logging.set_verbosity_error()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

torch.manual_seed(0)
prompts = [torch.randint(3, 64, (n,)).tolist() for n in (5, 40, 1, 17, 23)]
for version in (2, 3):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().to(DEVICE)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([ids]).to(DEVICE), **options)[0, len(ids) :].tolist() for ids in prompts]
    model.set_attn_implementation(f"flash_attention_{version}")
    found = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(**options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64),
    )
    tokens = [found[name].generated_tokens for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]
    assert tokens == wanted, (version, tokens, wanted)
    print(f"flash_attention_{version}: {sum(map(len, tokens))} tokens in pages, as generate()")
