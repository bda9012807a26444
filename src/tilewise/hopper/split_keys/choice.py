"""Choose the calls whose keys Hopper's kernels split, without importing these."""

from typing import Any, NamedTuple

from ...call.problem import Problem
from ...host.launch import multiprocessors
from ..counts import width


class Tile(NamedTuple):
    """Hold a tile's rows of queries, a program's stages of keys, a multiprocessor's programs, a thread's registers
    before the roles divide them, and keys of a sequence, and of a program, from which on it is faster than the portable
    kernel."""

    rows: int
    stages: int
    programs: int
    registers: int
    long: int
    loaded: int


FEW = Tile(16, 12, 1, 112, 1024, 2048)
"""With its registers, programs of `attention_combine` fit beside."""
LATENTS = Tile(16, 3, 2, 128, 0, 0), Tile(32, 7, 1, 152, 2048, 0)
"""With 16 rows, one program computes while a tile of the other's arrives. Two of 32 would have too few registers."""
SEQUENCES = 256
"""The most sequences, as registers hold the line."""


def splits(p: Problem) -> bool:
    """Tell whether these kernels can run a problem that `why_not` does not refuse."""
    small = max(p.D, p.D_v) <= 128 and p.splits_keys
    fits = 0 < p.B <= SEQUENCES and not p.layout.unbounded and p.out_dtype == p.dtype
    return fits and (small or latents(p)) and p.M > 0 and tile_of(p) is not None


def latents(p: Problem) -> bool:
    """Tell whether keys are latents in a cache, and values are their first columns (MLA)."""
    sizes = 256 < p.D <= 576 and p.D_v <= 512 and p.dtype.itemsize == 2
    return sizes and p.within and "cache" in p.needs


def tile_of(p: Problem) -> Any:
    """Return the smallest tile that holds all rows of a sequence and key head, or None."""
    tiles = LATENTS if latents(p) else (FEW,)
    return next((tile for tile in tiles if p.M * (p.H // p.H_k) <= tile.rows), None)


def few_keys(p: Problem) -> bool:
    """Tell whether the portable kernels are faster: these take longer to begin and to end, so they want many keys."""
    keys, tile = min(p.N, width(p) + p.M), tile_of(p)
    return keys < tile.long or p.B * keys < tile.loaded * programs_of(p)


def programs_of(p: Problem) -> int:
    """Return how many programs share the keys of a key head: together, as many as fit."""
    return max(1, multiprocessors(p.q.device) * tile_of(p).programs // p.H_k)
