"""GPT-2 in several sizes, and its texts: a file of tokens, or the source of the Python standard library."""

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

Attend = Callable[[Tensor], Tensor]
"""Causal attention of qkv (batch, length, 3, heads, head size)."""
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256
"""llm.c's files of tokens: 256 numbers of 32 bits (magic, version, count, ...), then tokens of 16 bits."""


class Block(nn.Module):
    """x + attention, then x + feed-forward, each after a layer norm."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.project(self.attend(qkv).flatten(2))
        return x + self.narrow(gelu(self.widen(self.norm_feed(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens in, logits of the next token out; the embedding is also the output layer."""

    def __init__(
        self, layers: int, heads: int, width: int, context: int, attend: Attend, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        blocks = [Block(width, heads, attend) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)
        for block in blocks:  # what adds to the residual stream is smaller, the more there are
            for module in (block.project, block.narrow):
                nn.init.normal_(module.weight, std=0.02 * (2 * layers) ** -0.5)

    def loss(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy (nats a token) of each token of text (batch, context + 1) given those before
        it."""
        x = self.embed(text[:, :-1]) + self.place.weight
        logits = self.norm(self.blocks(x)) @ self.embed.weight.mT  # (batch, context, vocabulary)
        return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


@torch.no_grad()
def move(model: nn.Module, seed: int) -> None:
    """Move every weight to its neighbour among fp32 numbers, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))


def library_text() -> Tensor:
    """Return the standard library's modules, in the order of their paths, as uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(path.parts))
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def read_tokens(path: Path) -> Tensor:
    """Return the tokens in a file of llm.c's format, as int32."""
    content = bytearray(path.read_bytes())
    header = torch.frombuffer(content, dtype=torch.int32, count=3).tolist() if len(content) > 4 * LLMC_HEADER else []
    if header[:2] != [LLMC_MAGIC, LLMC_VERSION]:
        raise ValueError(f"tokens: {path} is not a file of tokens as llm.c writes them (magic {LLMC_MAGIC}, version 1)")
    tokens = torch.frombuffer(content, dtype=torch.uint16, offset=4 * LLMC_HEADER)
    if len(tokens) != header[2]:
        raise ValueError(f"tokens: {path} should hold {header[2]} tokens, but holds {len(tokens)}; it was cut short")
    return tokens.to(torch.int32)


def in_order(text: Tensor, batch: int, context: int) -> Iterator[Tensor]:
    """Yield pieces (batch, context + 1) in order, once; each row's last token begins the next row."""
    step = batch * context
    for start in range(0, len(text) - step, step):
        yield text[start : start + step + 1].unfold(0, context + 1, context).long()


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Yield random pieces (batch, context + 1) without end, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        yield torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
