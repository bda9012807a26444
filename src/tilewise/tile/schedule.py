"""Which tile a program works on."""

import triton
import triton.language as tl


@triton.jit
def assign(program, tiles, heads, section):
    """(matrix, tile) of a program. `section` matrices run side by side, so that their keys share the cache, and the
    last tile comes first: with causal masks it is the longest."""
    per_section = section * tiles
    first = program // per_section * section
    r = program % per_section
    width = tl.minimum(heads - first, section)
    return first + r % width, tiles - 1 - r // width
