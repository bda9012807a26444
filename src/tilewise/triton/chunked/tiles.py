"""Tile sizes of the backward in chunks. They compile without spills for every chip of their kind."""

from typing import NamedTuple

from ...call.problem import Problem
from ..tiles import chips


class ChunkTiles(NamedTuple):
    """The tile of the backward in chunks: of S; the columns of a gradient that a program sums; how many entries a
    product sums at a time; warps and pipeline stages."""

    B_r: int
    B_c: int
    columns: int
    slice: int
    warps: int
    stages: int


CHUNKS: dict[tuple[str, int], ChunkTiles] = {
    ("hopper", 2): ChunkTiles(128, 128, 256, 64, 8, 3),
    ("hopper", 4): ChunkTiles(64, 64, 64, 16, 8, 1),
    ("blackwell", 4): ChunkTiles(32, 32, 64, 16, 4, 1),
    ("ampere", 2): ChunkTiles(128, 128, 128, 32, 8, 3),
    ("ampere", 4): ChunkTiles(64, 64, 64, 16, 8, 1),
    ("other", 2): ChunkTiles(128, 128, 128, 32, 8, 1),
    ("other", 4): ChunkTiles(64, 64, 64, 16, 8, 1),
    ("interpreter", 2): ChunkTiles(32, 32, 128, 32, 4, 1),
    ("interpreter", 4): ChunkTiles(32, 32, 128, 32, 4, 1),
}
"""Rows of the backward above head size 256, by the bytes of an entry. Triton 3.6 compiles none of 64 x 64 in fp32 for
sm_100."""


def chunk_tiles(p: Problem) -> ChunkTiles:
    """Return the row of a problem."""
    keys = [(kind, p.dtype.itemsize) for kind in chips(p.target)]
    return next(CHUNKS[key] for key in keys if key in CHUNKS)
