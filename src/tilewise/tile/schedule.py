"""Assign tiles to programs."""

from typing import NamedTuple

import triton
import triton.language as tl


class Schedule(NamedTuple):
    """Hold a head's tiles, the heads, and those of them that run concurrently. Each is 2 n + 1, as in `Packed`."""

    tiles: object
    heads: object
    section: object


@triton.jit
def counts(schedule):
    """Return tiles, heads and section of a schedule."""
    return schedule.tiles >> 1, schedule.heads >> 1, schedule.section >> 1


@triton.jit
def assign(program, tiles, heads, section):
    """Return (matrix, tile) of a program. `section` matrices run concurrently, so that their keys share the cache. The
    last tile comes first: with causal masks it is the longest."""
    per_section = section * tiles
    first = program // per_section * section
    r = program % per_section
    width = tl.minimum(heads - first, section)
    return first + r % width, tiles - 1 - r // width


@triton.jit
def assign_each(program, tiles, heads, section):
    """Return what `assign` does with a `section` of 1, where one matrix runs after the other."""
    return program // tiles, tiles - 1 - program % tiles
