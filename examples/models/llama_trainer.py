"""Train a small Llama with the Trainer of transformers, its attention on tilewise.

python examples/models/llama_trainer.py     needs `pip install 'tilewise[integrations]' accelerate`
"""

import tempfile

import torch
import transformers

import tilewise as tw
from tilewise.compat.transformers import install

STEPS = 60
LENGTHS = 24, 40


def sentence(seed: int) -> dict[str, torch.Tensor]:
    """Return tokens that count on from a random one, padded on the left to one length."""
    draw = torch.Generator().manual_seed(seed)
    length, start = (int(torch.randint(*bounds, (), generator=draw)) for bounds in (LENGTHS, (1, 60)))
    tokens = (start + torch.arange(length)) % 60 + 1
    room = LENGTHS[1] - length
    ids, real = (torch.cat([torch.zeros(room, dtype=torch.int64), x]) for x in (tokens, torch.ones_like(tokens)))
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def main() -> tuple[float, float, tw.Calls]:
    """Train, and return the first and last loss and the calls of attention."""
    install()  # before a model asks for attn_implementation="tilewise"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")
    with tempfile.TemporaryDirectory() as folder, tw.count_calls() as calls:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=5, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=[sentence(seed) for seed in range(480)])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return float(losses[0]), float(losses[-1]), calls


if __name__ == "__main__":
    first, last, calls = main()
    print(f"loss {first:.2f} to {last:.2f}; tilewise {calls}")
