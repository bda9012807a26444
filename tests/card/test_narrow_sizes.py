"""Narrow rows with padded ones, on a GPU: nothing else has shared memory (docs/internals/adr/0004)."""

from itertools import product

import pytest

from .sizes import TYPES, check, on_gpu

NARROW = list(product((3, 12, 20, 24, 33, 40, 72), (1, 2, 4, 8, 16, 32)))
"""A row of q that is padded, with a short one of v."""


@on_gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("D", "D_v"), NARROW)
def test_padded_rows_beside_short_ones(D, D_v, dtype):
    check("triton", D, D_v, TYPES[dtype])


@on_gpu
@pytest.mark.parametrize(("D", "D_v"), [(24, 16), (16, 16), (16, 32), (40, 32), (32, 32), (72, 32), (32, 8)])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_rows_off_16_byte_boundaries(D, D_v, dtype):
    """They are not pipelined, as padded ones are not."""
    check("triton", D, D_v, TYPES[dtype], strides="sliced")
