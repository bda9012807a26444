"""Exercises of page 2: FlashAttention-1.

python -m pytest docs/learn/exercises/test_page2.py
"""

import torch


def merge(first, second) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same queries saw two separate sets of keys. Gives O, m and l for both sets together.

    Each argument is a tuple (O, m, l) with O not divided, (heads, M, d), and m and l of (heads, M, 1). A set may be
    empty: then O = 0, m = -inf and l = 0. Nothing may overflow, and nothing may become NaN.
    """
    raise NotImplementedError


def best_tiles(d, fast) -> tuple[int, int]:
    """(B_r, B_c), multiples of 16, with which FlashAttention-1 moves least for long sequences of head size d.

    Fast memory holds `fast` numbers: Q and O of B_r rows, K and V of B_c rows, S, and m and l of B_r rows.
    """
    raise NotImplementedError


def row_sums(Q, K, V, dO, lse, B_c) -> torch.Tensor:
    """sum_k P_ik dP_ik of every row, (heads, M), without O: from B_c keys at a time. Full attention, scale 1/sqrt(d).

    No matrix may be as large as all of S.
    """
    raise NotImplementedError
