"""Assign tiles to programs."""

import triton
import triton.language as tl


@triton.jit
def assign(program, tiles, heads, section):
    """Return (matrix, tile) of a program. `section` matrices run concurrently, so that their keys share the cache. The
    last tile comes first: with causal masks it is the longest."""
    per_section = section * tiles
    first = program // per_section * section
    r = program % per_section
    width = tl.minimum(heads - first, section)
    return first + r % width, tiles - 1 - r // width
