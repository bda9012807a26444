"""Count what plan.py and by_gradient.py plan with: multiprocessors, heads of a loop, warps, columns."""

import os
from math import gcd
from typing import Any

import torch

from ..call.problem import Problem
from ..call.recipe import KINDS
from ..host.arguments import cdiv
from ..host.launch import multiprocessors
from ..host.outputs import size
from ..values.value import OPEN
from .tiles import BACKWARD, columns, padded

MARGIN = int(os.environ.get("TILEWISE_MARGIN", "0"))
"""Multiprocessors that attention leaves free, for messages that travel beside it."""
MOST_HEADS, SHORT_LOOP = 4, 2048
"""Limit a loop of the backward to MOST_HEADS query heads, since its epilogue takes some time. Allow more while they
have about SHORT_LOOP queries in all."""


def width_of_box(columns: int) -> int:
    """Return the columns of a box of TMA: of a single piece all; else what divides all pieces, up to 128 bytes."""
    return columns if columns in (64, 128, 256) else gcd(columns, 64)


def dropout_warps(p: Problem, crowded: int) -> int:
    """Return how many warps generate dropout bits: four, but from head size `crowded` on two, which fit next to the
    producer warp. One more warpgroup would leave the others too few registers, and at 256 too few for a single
    product."""
    return 0 if not p.recipe.dropout else 2 if padded(p) >= crowded else 4


def width(p: Problem) -> int:
    """Return how many other keys a row sees at most, by the parts of the mask that read no tensor; of
    functions, row 0 alone is asked."""
    read_nothing: list[Any] = [
        (KINDS[name], tuple(numbers)) for name, *numbers in p.recipe.mask if not KINDS[name].captures
    ]
    first, end = zip((-OPEN, OPEN), *(kind.rebuild(numbers, ()).keys(0) for kind, numbers in read_nothing), strict=True)
    return int(min(end) - max(first) - 1)


def narrow(p: Problem) -> bool:
    """Tell whether a row sees less than an eighth of the keys."""
    return 8 * width(p) < p.M


def even_section(heads: int, least: int) -> int:
    """Return how many matrices to run concurrently: `least` or more, always the same number. A small remainder would
    begin its longest tiles when the others are done."""
    return cdiv(heads, max(1, heads // least))


def processors(device: torch.device) -> int:
    """Return how many of the GPU's multiprocessors kernels start on."""
    return max(1, multiprocessors(device) - MARGIN)


def heads_per_loop(p: Problem, row: Any, limit: int = MOST_HEADS) -> int:
    """Return how many query heads of a key head one program of the backward loops over, up to `limit` unless they are
    short. Other programs take the rest (see backward/gqa_reduce.py)."""
    group, tiles = max(1, p.H // p.H_k), cdiv(p.N, row.B_c)
    least = cdiv(SHORT_LOOP, max(1, p.M))
    most = max(least, limit // 2 if p.recipe.deterministic else limit)

    def fits(heads: int) -> bool:
        programs = p.B * p.H // heads * tiles
        return group % heads == 0 and (heads <= least or 2 * programs >= 3 * processors(p.q.device))

    return next(heads for heads in range(min(most, group), 0, -1) if fits(heads))


def gqa_sizes(p: Problem, B_c: int, programs: int) -> list[Any]:
    """Return the sizes of GQA partial sums and of their semaphore; none if one program has each key tile to itself."""
    blocks = p.key_blocks(B_c) * p.H_k * p.batch
    width = max(columns(p, BACKWARD))
    found = [size(torch.float32, blocks * 2 * B_c * width), size(torch.int32, 2 * blocks)]
    return found if programs > 1 else []


def needs_mask_in_loop(p: Problem, own: int, other: int) -> bool:
    """Return whether a loop over tiles of `other` may need the mask after its first tile. It does not where the
    diagonal of a block of `own` rows (or keys) lies inside one tile."""
    alone = p.recipe.mask == (("Causal",),)
    return bool(p.recipe.mask) and not (alone and other % own == 0 and under_diagonal(p, own))


def under_diagonal(p: Problem, size: int) -> bool:
    """Return whether every row's last key lies on the diagonal, and the diagonal crosses tiles of `size` in their
    corners."""
    offset = p.layout.common(p.N - p.M)
    aligned = offset % size == 0 and offset >= 0
    return aligned and bool(p.recipe.mask) and all([mask.hides_later_keys for mask in p.masks])
