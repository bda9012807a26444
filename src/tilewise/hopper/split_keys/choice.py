"""Choose the calls whose keys Hopper's kernels split, without importing these."""

from ...call.problem import Problem
from ...host.launch import multiprocessors
from ..plan import width

ROWS = 16
"""Rows of queries in a tile."""
SEQUENCES = 256
"""The most sequences, as registers hold the line."""
LONG, LOADED = 1024, 2048
"""Keys of a sequence, and of a program, from which on these kernels are faster than the portable ones."""


def splits(p: Problem) -> bool:
    """Tell whether these kernels can run a problem that `why_not` does not refuse."""
    small = 0 < p.M * (p.H // p.H_k) <= ROWS and max(p.D, p.D_v) <= 128 and 0 < p.B <= SEQUENCES
    return small and p.splits_keys and not p.layout.unbounded and p.out_dtype == p.dtype


def few_keys(p: Problem) -> bool:
    """Tell whether the portable kernels are faster: these take longer to begin and to end, so they want many keys."""
    keys = min(p.N, width(p) + p.M)
    return keys < LONG or p.B * keys < LOADED * programs_of(p)


def programs_of(p: Problem) -> int:
    """Return how many programs share the keys of a key head: one a multiprocessor in all."""
    return max(1, multiprocessors(p.q.device) // p.H_k)
