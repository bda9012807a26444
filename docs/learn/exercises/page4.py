"""Exercises of page 4: FlashAttention-3.

python -m pytest docs/learn/exercises/test_page4.py
"""

import torch


def in_turns(tiles, multiply, exponentiate) -> list[tuple[str, int, int, float]]:
    """A schedule for two warpgroups: a list of (unit, group, tile, start), two tasks for every group and tile.

    Task "multiply" of a tile takes that many cycles on the tensor cores, then task "exponentiate" takes its cycles on
    the unit for exponentials. A unit does one task at a time, for both groups. A group multiplies its next tile only
    when it has exponentiated this one. The last task must end as early as possible.
    """
    raise NotImplementedError


def pipelined(product, Q, K, V, B_c) -> torch.Tensor:
    """O of full attention, one tile of keys ahead: S of tile j + 1 starts before P V of tile j.

    Every product is to be made by product(name, A, B), which gives A @ B; name is "S" or "PV".
    """
    raise NotImplementedError


def hadamard(X) -> torch.Tensor:
    """X H / sqrt(d) for X of (..., d), where d is a power of 2, in about d log2(d) additions a row.

    H is the Hadamard matrix: [1] for d = 1, and then [[H, H], [H, -H]]. It is never built.
    """
    raise NotImplementedError
