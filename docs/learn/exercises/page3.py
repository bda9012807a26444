"""Exercises of page 3: FlashAttention-2.

python -m pytest docs/learn/exercises/test_page3.py
"""


def one_walk(Q, K, V, dO, lse, delta, B):
    """dQ, dK, dV of full attention in one walk over square tiles of B, with five products a tile.

    Lengths are multiples of B, the scale is 1/sqrt(d), lse and delta are (heads, M).
    """
    raise NotImplementedError


def longest_first(costs, processors):
    """Shares tiles out: costs[t] is the time of tile t. Gives a list of tiles for each processor.

    Nobody may have to work longer than a tenth more than would be fair.
    """
    raise NotImplementedError


def split_keys(attention, Q, K, V, parts):
    """O of queries that see all keys, from `parts` calls that could run at the same time, with a share of the keys each.

    attention(Q, K, V) gives O, (heads, M, d), divided, and lse, (heads, M), of the keys that it is given.
    """
    raise NotImplementedError
