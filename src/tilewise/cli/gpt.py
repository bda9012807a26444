"""A small GPT on bytes, and the text it reads: the source of the Python standard library that is running."""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k, v (batch, length, heads, head size)."""


class Block(nn.Module):
    """x + attention, then x + feed-forward, each after a layer norm."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attend(q, k, v).flatten(2))
        return x + self.feed(self.norm_feed(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; the embedding is also the output layer."""

    def __init__(self, layers: int, heads: int, width: int, context: int, attend: Attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)

    def loss(self, text: Tensor) -> Tensor:
        """Mean cross-entropy (nats a byte) of each byte of text (batch, context + 1) given those before it."""
        x = self.embed(text[:, :-1]) + self.place.weight
        logits = self.norm(self.blocks(x)) @ self.embed.weight.mT  # (batch, context, 256)
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def library_text() -> Tensor:
    """The standard library's own modules, in the order of their paths, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Random pieces (batch, context + 1) for ever, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        yield torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
