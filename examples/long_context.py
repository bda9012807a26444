"""Train a small language model on sequences that no process holds as a whole; its losses are those of one process.

torchrun --nproc-per-node 4 examples/long_context.py            on a CPU with gloo, on GPUs with NCCL
torchrun --nproc-per-node 1 examples/long_context.py            the same losses
torchrun --nproc-per-node 4 examples/long_context.py --plan ulysses --length 4096
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import tilewise as tw
import tilewise.parallel as tp


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what enters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cos, sin, **options):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = tw.rotary(q, cos, sin), tw.rotary(k, cos, sin)
        x = x + self.out(tp.attention(q, k, v, mask=tw.Causal(), **options).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.size = width // heads

    def forward(self, tokens, positions, **options):
        turns = positions[:, None] / 10000.0 ** (torch.arange(0, self.size, 2, device=tokens.device) / self.size)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, turns.cos().to(x.dtype), turns.sin().to(x.dtype), **options)
        return self.head(x)


def train(length: int, steps: int, plan: str | None, device: torch.device) -> None:
    """Train, and print every loss on the first rank."""
    torch.manual_seed(0)
    model, sharding = Model().to(device), tp.Zigzag(dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    text = torch.tensor(list(" ".join(f"{n} squared is {n * n}." for n in range(2000)).encode()), device=device)
    positions = sharding.positions(length, device)
    for step in range(steps):
        start = step * length % (len(text) - length - 1)
        tokens = text[None, start : start + length]
        labels = text[None, start + 1 : start + length + 1]  # shifted before they are sharded
        own, own_labels = sharding.shard((tokens, labels))
        logits = model(own, positions, sharding=sharding, plan=plan)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():  # each rank has its rows' share; FSDP2 and DDP sum in the same way
            dist.all_reduce(weight.grad)
        optimizer.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)


def main() -> None:
    """Train on this process group; it ends when no tensor needs it any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plan", choices=("ring", "gather", "halo", "ulysses"))
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    train(given.length, given.steps, given.plan, device)
    dist.barrier()  # no rank leaves while another still receives
    dist.destroy_process_group()
    if not on_gpu:
        time.sleep(0.5)  # gloo's threads end a little later, and PyTorch aborts where Python ends first


if __name__ == "__main__":
    main()
