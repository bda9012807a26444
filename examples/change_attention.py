"""Train a small model whose attention has two changes, each a plain Python function: a mask and a learned bias.

python examples/change_attention.py               a minute on a CPU
python examples/change_attention.py --steps 50

Rows are packed documents of words from 0 to 15; each begins with a title. The label of a small word is the word 5
places back, that of a large one is the title. A window of 16 words loses the titles, so the mask shows them, too. The
model has no positional embeddings: without the bias it finds titles, and mostly guesses the words 5 places back.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import tilewise as tw

WORDS, BACK, WINDOW = 16, 5, 16
BATCH, LENGTH = 8, 256


def near_or_title(b, h, i, j, first):
    """Show a word those before it in its own document: a window of them, and the title."""
    own = (first[b, i] <= j) & (j <= i)
    return own & ((i - j < WINDOW) | (j == first[b, i]))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what enters."""

    def __init__(self, width: int, heads: int, biased: bool) -> None:
        super().__init__()
        self.heads, self.biased = heads, biased
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.table = nn.Parameter(torch.zeros(heads, WINDOW + 1))  # a number for each head and distance

    def relative(self, s, b, h, i, j):
        """Add a learned bias by distance; all that are farther than the window share one."""
        return s + self.table[h, (i - j).clamp(0, WINDOW)]

    def forward(self, x: Tensor, mask: tw.Mask) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, N, H, D) each
        o = tw.attention(q, k, v, mask=mask, score=self.relative if self.biased else ())
        x = x + self.out(o.flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """A decoder without positional embeddings."""

    def __init__(self, biased: bool, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2 * WORDS, width), nn.Linear(width, WORDS)  # words, and titles
        self.blocks = nn.ModuleList(Block(width, heads, biased) for _ in range(layers))

    def forward(self, tokens: Tensor, first: Tensor) -> Tensor:
        x, mask = self.embed(tokens), tw.Mask.of(near_or_title, first)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def batch(draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and the place of each token's title, all (BATCH, LENGTH); label -1 does not count."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=draw)
    begins = torch.rand(BATCH, LENGTH, generator=draw) < 1 / 64
    begins[:, 0] = True
    places = torch.arange(LENGTH).expand(BATCH, -1)
    first = torch.where(begins, places, 0).cummax(1).values
    labels = torch.where(tokens < WORDS // 2, tokens.roll(BACK, 1), tokens.gather(1, first))
    labels = labels.where(places - first > BACK, -1)
    return tokens + WORDS * begins, labels, first


def train(biased: bool, steps: int) -> tuple[float, float, float]:
    """Train; print progress; return the first and the last loss, and how many labels of new rows are right."""
    torch.manual_seed(0)
    model, draw = Model(biased), torch.Generator().manual_seed(1)
    optimizer, losses, began = torch.optim.AdamW(model.parameters(), 3e-3), [], time.perf_counter()
    for step in range(steps):
        tokens, labels, first = batch(draw)
        logits = model(tokens, first)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"  step {step:3} loss {losses[-1]:.3f} ({time.perf_counter() - began:.0f} s)", flush=True)
    with torch.no_grad():
        tokens, labels, first = batch(draw)
        right = (model(tokens, first).argmax(-1) == labels)[labels >= 0].float().mean().item()
    if biased:
        table = max((block.table for block in model.blocks), key=lambda t: t[:, BACK].max())
        numbers = [f"{x:.1f}" for x in table[table[:, BACK].argmax()]]
        print("  one head's bias by distance:", *numbers)
    return losses[0], losses[-1], right


def main() -> None:
    """Train with the bias and without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    for biased in (True, False):
        print(f"{'with' if biased else 'without'} the bias")
        first, last, right = train(biased, steps)
        print(f"  loss {first:.3f} to {last:.3f}, {right:.0%} of the labels right")


if __name__ == "__main__":
    main()
