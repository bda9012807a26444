"""How the backward's work is cut into walks, and how many matrices lie side by side, from a problem and its tiles. The
launches of 16-bit types and of fp32 ask."""

from functools import lru_cache
from typing import Any

import torch

from ..host.launch import cdiv
from ..problem import Problem
from .backward.gqa_reduce import Shares
from .tiles import padded

CACHED_QUERIES = 16 << 20
"""Bytes of Q, dO and sums of dQ that programs running side by side may share."""
MOST_HEADS, SHORT_WALK = 4, 2048
"""Query heads of a walk in the backward, at most, unless these have fewer queries in all: its end takes some time."""


def evenly(heads: int, least: int) -> int:
    """How many matrices to work on side by side: `least` or more, always the same number. A few left over for the end
    would begin with their longest tiles when others are done."""
    return cdiv(heads, max(1, heads // least))


@lru_cache(64)
def processors(device: torch.device) -> int:
    """Multiprocessors of the card, or of an H200 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def key_tiles(p: Problem, B_c: int) -> int:
    """Key tiles of a head in what shares leave; of packed sequences, of all of them."""
    return p.k.shape[0] // B_c + p.B if p.recipe.varlen else cdiv(p.N, B_c)


def heads_of_walk(p: Problem, row: Any) -> int:
    """How many query heads of a key head one walk of the backward takes; other walks take the rest (see
    backward/gqa_reduce.py)."""
    group, tiles = max(1, p.H // p.H_k), cdiv(p.N, row.B_c)
    least = cdiv(SHORT_WALK, max(1, p.M))
    most = max(least, MOST_HEADS // 2 if p.recipe.deterministic else MOST_HEADS)

    def fits(heads: int) -> bool:
        walks = p.B * p.H // heads * tiles
        return group % heads == 0 and (heads <= least or 2 * walks >= 3 * processors(p.q.device))

    return next(heads for heads in range(min(most, group), 0, -1) if fits(heads))


def row_blocks(p: Problem, B_r: int) -> int:
    """Query tiles of a head in the sums of dQ; of packed sequences, of all of them."""
    return p.q.shape[0] // B_r + p.B if p.recipe.varlen else cdiv(p.M, B_r)


def turn(p: Problem, sides: bool) -> int:
    """Query tiles of a turn, if dQ has to repeat: two, or one where a visit takes longer, at head size 256."""
    return 0 if not p.recipe.deterministic else 1 if sides else 2


def empty_shares(p: Problem, row: Any, shares: int, device: torch.device) -> Shares | None:
    """What so many walks of a tile of keys leave to each other, nothing so far."""
    if shares == 1:
        return None
    blocks = key_tiles(p, row.B_c) * p.H_k * (1 if p.recipe.varlen else p.B)
    sums = torch.empty(blocks * 2 * row.B_c * padded(p), dtype=torch.float32, device=device)
    return Shares(sums, torch.zeros(2 * blocks, dtype=torch.int32, device=device))
