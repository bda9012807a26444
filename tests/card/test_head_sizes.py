"""Every head size that needs padding, on a GPU: o, lse and all gradients, by the rule of the conformance tests.

What a padded row costs is seen only there: the interpreter and the CPU have no shared memory (docs/adr/0004).

python -m pytest tests/card/test_head_sizes.py -n 16      most of it is compiling: a kernel belongs to a pair of sizes
"""

from itertools import product

import pytest
import torch
from conformance import rule
from conformance.cases import Case, bf16, causal, fp16, fp32, make

CARD = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU can answer")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason=f"needs compute capability 9.0, an H100 or H200; here is {CARD}",
)
TYPES = {"fp16": fp16, "bf16": bf16, "fp32": fp32}
EVERY = [(D, 101 * D % 257) for D in range(1, 257)]
"""Pairs (D, D_v) with each size from 1 to 256 once on either side: 257 is a prime."""
NARROW = list(product((3, 12, 20, 24, 33, 40, 72), (1, 2, 4, 8, 16, 32)))
"""A row of q that is padded beside a short one of v."""
IN_EIGHTS = [(8 * n, 8 * (14 * n % 33)) for n in range(1, 33)]
"""The same as EVERY for Hopper's kernels; 14 and 33 share no divisor."""
IN_EIGHTS_TO_128 = [(8 * n, 8 * (5 * n % 17)) for n in range(1, 17)]


def check(backend: str, D: int, D_v: int, dtype: torch.dtype, **more: str) -> None:
    """One call, forward and backward, with whole tiles and with ragged ones."""
    name = f"{backend} D {D} D_v {D_v} {dtype} {more}"
    case = Case(name, B=1, M=200, N=200, D=D, D_v=D_v, dtype=dtype, mask=causal, size="large", **more)
    call = make(case, "cuda")
    true = rule.truth(case, call)
    rule.assert_as_accurate_as_torch(rule.run(case, call, backend), true, rule.bounds(case, call, true))


def test_the_pairs_hold_every_size_on_either_side():
    for pairs, sizes in ((EVERY, range(1, 257)), (IN_EIGHTS, range(8, 257, 8)), (IN_EIGHTS_TO_128, range(8, 129, 8))):
        for side in (0, 1):
            assert sorted(pair[side] for pair in pairs) == list(sizes)


@on_gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("D", "D_v"), EVERY)
def test_every_head_size(D, D_v, dtype):
    check("triton", D, D_v, TYPES[dtype])


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
