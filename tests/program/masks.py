"""31 masks that users of FlexAttention write, attention-gym's and some more, for n rows and keys, n >= 40."""

import math
from collections.abc import Callable
from typing import Any

import torch

B, H = 2, 2
Mask = Callable[..., Any]


def masks(n: int) -> dict[str, Mask]:
    """Return functions of (b, h, i, j) by name, for B batch entries and H heads."""
    return {fn.__name__: fn for fn in (*of_distance(n), *of_squares(n), *of_tensors(n))}


def of_distance(n: int) -> list[Mask]:
    """Return masks by position."""
    half, near = n // 2, n // 8

    def causal(b, h, i, j):
        return i >= j

    def sliding_window(b, h, i, j):
        return (i >= j) & (i - j <= near)

    def both_sides(b, h, i, j):
        return (i - j).abs() <= near

    def not_near(b, h, i, j):
        return ~((i - j).abs() < near)

    def sloped(b, h, i, j):
        return 3 * j <= 2 * i + 4

    def block_diagonal(b, h, i, j):
        return i // near == j // near

    def chunks(b, h, i, j):
        return (i >= j) & (i // near == j // near)

    def chunks_before(b, h, i, j):
        return (i // near - j // near <= 1) & (i // near >= j // near)

    def late_rows(b, h, i, j):
        return (i >= j) & (i >= half)

    def few_global(b, h, i, j):
        return ((i - j).abs() <= n // 16) | (i < 4) | (j < 4)

    def sinks_and_window(b, h, i, j):
        return (i >= j) & ((j < 4) | (i - j <= near))

    def window_per_head(b, h, i, j):
        return (i >= j) & (i - j < (h + 1) * (n // 4))

    def direction_by_head(b, h, i, j):
        return torch.where(h % 2 == 0, i >= j, i <= j)

    return [
        causal, sliding_window, both_sides, not_near, sloped, block_diagonal, chunks, chunks_before, late_rows,
        few_global, sinks_and_window, window_per_head, direction_by_head,
    ]  # fmt: skip


def of_squares(n: int) -> list[Mask]:
    """Return masks by remainders, and of images."""
    half, near, size, side = n // 2, n // 8, max(1, n // 64), math.isqrt(n - 1) + 1

    def dilated(b, h, i, j):
        return ((i - j).abs() <= near) & ((i - j) % 2 == 0)

    def stripes(b, h, i, j):
        return ((j - i) % (n // 4) == 0) | (j // size == i // size)

    def natten(b, h, i, j):
        k = side // 8
        x, y = (i // side).clamp(k, side - 1 - k), (i % side).clamp(k, side - 1 - k)
        return ((x - j // side).abs() <= k) & ((y - j % side).abs() <= k)

    def disc(b, h, i, j):
        x, y = i // side - j // side, i % side - j % side
        return x * x + y**2 <= (side // 4) ** 2

    def sliding_tiles(b, h, i, j):
        x, y = i // size // 8, i // size % 8
        return ((x - j // size // 8).abs() <= 1) & ((y - j // size % 8).abs() <= 1)

    def block_diffusion(b, h, i, j):
        noised_i, noised_j = i < half, j < half
        block_i, block_j = (i % half) // size, (j % half) // size
        own = (block_i == block_j) & (noised_i == noised_j)
        return own | ((block_i > block_j) & noised_i & ~noised_j) | ((block_i >= block_j) & ~noised_i & ~noised_j)

    return [dilated, stripes, natten, disc, sliding_tiles, block_diffusion]


def of_tensors(n: int) -> list[Mask]:
    """Return masks that read tensors."""
    half, near, draw = n // 2, n // 8, torch.Generator().manual_seed(0)
    prefix, lengths = torch.tensor([n // 4, half]), torch.tensor([n - n // 3, n], dtype=torch.int32)
    cuts, offset = torch.tensor([0, n // 6, n // 3, half + 3, n - n // 5, n]), torch.tensor([3, n // 5])
    doc = (torch.searchsorted(cuts, torch.arange(n), right=True) - 1).int()
    docs, starts, is_global = torch.stack([doc, doc.flip(0)]), cuts[doc.long()].int(), torch.arange(n) % half == 0
    images, owner = torch.arange(n) * 4 // n, torch.arange(n) * 8 // n // 2
    parents, blocks = torch.rand(n, n, generator=draw) < 0.01, torch.rand(B, H, 65, 65, generator=draw) < 0.2

    def prefix_lm(b, h, i, j):
        return (j < prefix[b]) | (i >= j)

    def padding(b, h, i, j):
        return j < lengths[b]

    def padding_of_both(b, h, i, j):
        return (i < lengths[b]) & (j < lengths[b])

    def batched(b, h, i, j):
        row, key = i - offset[b], j - offset[b]
        return (row >= 0) & (key >= 0) & (row >= key)

    def document(b, h, i, j):
        return doc[i] == doc[j]

    def document_causal(b, h, i, j):
        return (docs[b, i] == docs[b, j]) & (i >= j)

    def document_starts(b, h, i, j):
        return (j >= starts[i]) & (i >= j)

    def shared_prefix(b, h, i, j):
        return (j < prefix[0]) | ((i >= j) & (i // near == j // near))

    def longformer(b, h, i, j):
        return ((i - j).abs() <= n // 16) | is_global[i] | is_global[j]

    def flamingo(b, h, i, j):
        return images[i] == owner[j]

    def token_tree(b, h, i, j):
        return (i >= j) & ((j < half) | parents[i, j])

    def listed_blocks(b, h, i, j):
        return blocks[b, h, i * 64 // n, j * 64 // n]

    return [
        prefix_lm, padding, padding_of_both, batched, document, document_causal, document_starts, shared_prefix,
        longformer, flamingo, token_tree, listed_blocks,
    ]  # fmt: skip
