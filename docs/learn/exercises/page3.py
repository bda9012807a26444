"""Exercises of page 3: FlashAttention-2.

python -m pytest docs/learn/exercises/test_page3.py
"""

import torch


def one_pass(Q, K, V, dO, lse, delta, B) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV of full attention in one pass over square tiles of B, with five products a tile.

    Lengths are multiples of B, the scale is 1/sqrt(d), lse and delta are (heads, M).
    """
    raise NotImplementedError


def longest_first(costs, processors) -> list[list[int]]:
    """Shares tiles out: costs[t] is the time of tile t. Gives a list of tiles for each processor.

    Nobody may have to work longer than a tenth more than would be fair.
    """
    raise NotImplementedError


def split_keys(attention, Q, K, V, parts) -> torch.Tensor:
    """O of queries that see all keys, from `parts` calls, each with its share of the keys, that could run side by side.

    attention(Q, K, V) gives O, (heads, M, d), divided, and lse, (heads, M), of the keys that it is given.
    """
    raise NotImplementedError
