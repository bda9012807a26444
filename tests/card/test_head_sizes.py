"""Every head size, on a GPU, in every type: most of the time is compiling, as a kernel belongs to a pair of sizes."""

import pytest
import torch
from conformance.cases import fp32

from .sizes import TYPES, check, on_gpu

CARD = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason=f"needs compute capability 9.0, an H100 or H200; here is {CARD}",
)
EVERY = [(D, 101 * D % 257) for D in range(1, 257)]
"""Pairs (D, D_v) with each size from 1 to 256 once on either side: 257 is a prime."""
IN_EIGHTS = [(8 * n, 8 * (14 * n % 33)) for n in range(1, 33)]
"""The same as EVERY for Hopper's kernels; 14 and 33 share no divisor."""
IN_EIGHTS_TO_128 = [(8 * n, 8 * (5 * n % 17)) for n in range(1, 17)]


def test_the_pairs_hold_every_size_on_either_side():
    for pairs, sizes in ((EVERY, range(1, 257)), (IN_EIGHTS, range(8, 257, 8)), (IN_EIGHTS_TO_128, range(8, 129, 8))):
        for side in (0, 1):
            assert sorted(pair[side] for pair in pairs) == list(sizes)


@on_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("D", "D_v"), EVERY)
def test_every_head_size(D, D_v, dtype):
    check("triton", D, D_v, TYPES[dtype])


@on_hopper
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("D", "D_v"), IN_EIGHTS)
def test_every_head_size_that_hopper_takes(D, D_v, dtype):
    check("hopper", D, D_v, TYPES[dtype])


@on_hopper
@pytest.mark.parametrize("precision", ["fp16x3", "bf16x6"])
@pytest.mark.parametrize(("D", "D_v"), IN_EIGHTS_TO_128)
def test_every_head_size_that_hopper_takes_in_fp32(D, D_v, precision):
    check("hopper", D, D_v, fp32, precision=precision)
