"""Tile sizes: one row per kernel, kind of chip, kind of type and head size."""

from typing import NamedTuple

import torch

from ..problem import Problem


class Tiles(NamedTuple):
    """Rows of queries, columns of keys, warps and pipeline stages of one kernel."""

    B_r: int
    B_c: int
    warps: int
    stages: int


FORWARD = {
    # (chip, bytes per entry): {largest head size: tiles}
    ("hopper", 2): {64: Tiles(128, 64, 8, 4), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 32, 8, 3)},
    ("hopper", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    ("ampere", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 32, 4, 3), 256: Tiles(64, 32, 4, 2)},
    ("ampere", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(16, 16, 4, 1)},
    ("any", 2): {64: Tiles(64, 32, 4, 1), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    ("any", 4): {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("interpreter", 4): {256: Tiles(32, 32, 4, 1)},
}

DKDV = {
    ("hopper", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(32, 128, 8, 3), 256: Tiles(32, 64, 8, 2)},
    ("hopper", 4): {64: Tiles(32, 64, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("ampere", 2): {64: Tiles(32, 128, 4, 2), 128: Tiles(32, 64, 4, 2), 256: Tiles(16, 64, 8, 1)},
    ("ampere", 4): {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("any", 2): {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("any", 4): {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("interpreter", 4): {256: Tiles(32, 32, 4, 1)},
}

DQ = {
    ("hopper", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 2)},
    ("hopper", 4): {64: Tiles(64, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("ampere", 2): {64: Tiles(128, 32, 4, 2), 128: Tiles(64, 32, 4, 2), 256: Tiles(64, 16, 8, 1)},
    ("ampere", 4): {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("any", 2): {64: Tiles(32, 32, 4, 1), 128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("any", 4): {64: Tiles(32, 32, 4, 1), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("interpreter", 4): {256: Tiles(32, 32, 4, 1)},
}

HOPPER = ("sm_90", "sm_100", "sm_103")
AMPERE = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
OTHERS = ("sm_70", "sm_72", "sm_75", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201")


def chip(target: str) -> str:
    """The rows of the tables that a target reads."""
    if target == "cpu":
        return "interpreter"
    return "hopper" if target in HOPPER else "ampere" if target in AMPERE else "any"


def choose(table: dict[tuple[str, int], dict[int, Tiles]], p: Problem) -> Tiles:
    """The row of a table for a problem."""
    rows = table[chip(p.target), 4 if p.dtype == torch.float32 else 2]
    return next(tiles for size, tiles in rows.items() if max(p.D, p.D_v) <= size)
