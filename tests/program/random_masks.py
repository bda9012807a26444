"""Random masks, for tests by property: programs of a few dozen operations on indices and small tensors."""

import random

import torch

B, H, SIZE = 2, 3, 24
"""Sizes that rows and keys must not exceed."""


class RandomMask:
    """A function of (b, h, i, j), the same for equal seeds. `floating`: also with floating numbers."""

    def __init__(self, seed: int, floating: bool = True) -> None:
        self.seed, self.floating = seed, floating
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.arange(SIZE).mul(4).div(SIZE, rounding_mode="floor").expand(B, SIZE).int()
        self.some = torch.randint(-9, 30, (SIZE,), generator=draw)
        self.lengths = torch.randint(0, SIZE, (B,), generator=draw)
        self.bools = torch.rand(H, SIZE, generator=draw) < 0.4
        self.pairs = torch.rand(6, 6, generator=draw)
        self.reals = torch.randn(B, SIZE, generator=draw)
        self.reals[0, 3], self.reals[1, 20] = torch.inf, torch.nan

    def __call__(self, b, h, i, j):
        self.of, self.b, self.h, self.i, self.j = random.Random(self.seed), b, h, i, j
        return self.truth(4)

    def truth(self, depth):
        of = self.of
        if depth == 0 or of.random() < 0.3:
            x, y = (
                (self.real(2), self.real(1))
                if self.floating and of.random() < 0.3
                else (self.number(2), self.number(1))
            )
            found = [x <= y, x < y, x >= y, x > y, x == y, x != y, self.bools[self.h, self.index()]]
            return of.choice(found + [self.pairs[self.i // 4, self.j // 4] < 0.5] * self.floating)
        x, y = self.truth(depth - 1), self.truth(depth - 1)
        return of.choice([x & y, x & y, x | y, ~x, x ^ y, torch.where(self.truth(0), x, y), x == y])

    def leaf(self):
        found = [self.i, self.j, self.i, self.j, self.b, self.h, self.of.randint(-6, 20) + 0 * self.b]
        found += [self.ids[self.b, self.i], self.ids[self.b, self.j], self.lengths[self.b], self.some[self.j]]
        return self.of.choice(found)

    def number(self, depth):
        of = self.of
        if depth == 0 or of.random() < 0.2:
            return self.leaf()
        x, y, k = self.number(depth - 1), self.number(depth - 1), of.choice([1, 2, 3, 5, -2])
        c = self.leaf() > 4
        return of.choice([
            x + y, x - y, x - y, x * k, x * y, x * x, x // k, x % k, -x, abs(x - y), abs(x), x & 7, x >> 1, x << 1,
            torch.minimum(x, y), torch.maximum(x, y), torch.where(c, x, y), x.clamp(1, 9), x ^ y, self.some[x % SIZE],
            x % (self.h + 1), x // (self.b + 1), (x > y).long(), *[(x * 0.37).floor().long()] * self.floating,
        ])  # fmt: skip

    def real(self, depth):
        x, y = self.number(depth), self.reals[self.b, self.index()]
        return self.of.choice([
            x * 0.3, x + y, x / 4.0, torch.sqrt(x.float()), torch.exp(y), torch.tanh(x * 0.2), torch.log(y.abs()), y,
            torch.sin(x.float()), x.float() / (y + 2), y - y, torch.maximum(y, x.float()), x.float() % 0.7, y * 0.0,
        ])  # fmt: skip

    def index(self):
        x = self.of.choice([self.i, self.j, self.i // 2, self.j // 3, (self.i - self.j).abs(), self.leaf() % SIZE])
        return self.of.choice([x, x, -1 - x])
