"""Generate with transformers and a static cache, prompts padded on the left, attention on tilewise.

python examples/models/generate_static_cache.py     needs `pip install 'tilewise[integrations]'`
"""

import torch
import transformers

import tilewise as tw
from tilewise.compat.transformers import install

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    """Return random prompts of these lengths as one batch, padded on the left."""
    ids, real = (torch.zeros(len(lengths), max(lengths), dtype=torch.int64) for _ in range(2))
    for b, length in enumerate(lengths):
        ids[b, -length:], real[b, -length:] = torch.randint(1, 90, (length,)), 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": real.to(DEVICE)}


def main() -> tuple[torch.Tensor, torch.Tensor, tw.Calls]:
    """Return the tokens generated with eager attention and with tilewise, and the calls of attention."""
    install()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE).eval()
    given = prompts(5, 12, 9)
    # "static" allocates the cache once, for all tokens to come; on a GPU each step is then one compiled graph
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    eager = model.generate(**given, **options)
    model.set_attn_implementation("tilewise")
    with tw.count_calls() as calls:
        ours = model.generate(**given, **options)
    return eager, ours, calls


if __name__ == "__main__":
    eager, ours, calls = main()
    same = (eager == ours).all(1).sum()
    print(f"{same} of {len(ours)} continuations as with eager attention; tilewise {calls}")
