"""What is rehearsed: masks of eight heads, and packed sequences."""

import torch

import tilewise as tw

H = 8
ENDS = torch.tensor([0, 200, 200, 265, 700], dtype=torch.int32)
"""Of packed queries, and keys."""


def blocks(M: int, N: int) -> torch.Tensor:
    """Empty, full and partial tiles, others in every head; the first head sees nothing, the last all but some keys."""
    chance = torch.linspace(0, 1, H)[:, None, None]
    coarse = torch.rand(H, M // 64, N // 64, generator=torch.Generator().manual_seed(0)) < chance
    return coarse.repeat_interleave(64, 1).repeat_interleave(64, 2) & (torch.arange(N) % 300 != 7)


MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(150, 0),
    "open": tw.Window(None, 70),
    "prefix": tw.Prefix(torch.tensor([200])),
    "blocks": tw.Dense(blocks(512, 512)),
}


def packed(mask):
    """The layout of packed sequences, and the first query, the first key and the mask written out of each."""
    longest, starts, sizes = int(ENDS.diff().max()), ENDS.tolist(), ENDS.diff().tolist()
    masks = [mask.dense(size, size).expand(H, size, size) for size in sizes]
    return tw.Varlen(ENDS, ENDS, longest, longest), list(zip(starts[:-1], starts[:-1], masks, strict=True))
