"""Blocks of rows: how wide they are for each head size and type (docs/internals/adr/0004)."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.call.problem import MAX_VALUE_SIZE
from tilewise.tile.blocks import block
from tilewise.tile.rows import Rows

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")


@triton.jit
def measure(X, out, d: tl.constexpr):
    """The columns of a block, and how many of them exist."""
    b = tl.program_id(0)
    made = block(X, b, b, 0, 16, d)
    tl.store(out, made.at.shape[1])
    tl.store(out + 1, tl.sum(made.exists.to(tl.int32)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_block_is_narrower_than_its_products_allow(dtype):
    """Narrower than 64 columns are only rows of 16-bit types that fill them: nothing of them is padding."""
    for d in range(1, MAX_VALUE_SIZE + 1):
        out = torch.zeros(2, dtype=torch.int32)
        measure[(1,)](Rows(torch.zeros(16 * d, dtype=dtype), 0, d, 0), out, d)
        columns, exist = out.tolist()
        assert columns in (16, 32, 64, 128, 256, 512), f"{columns} columns for {d}"
        assert d <= columns < max(2 * d, 65)
        if columns < 64:
            assert dtype != torch.float32, f"{columns} columns for {d}"
            assert d == columns, f"{columns} columns for {d}: a padded row takes at least 64"
        assert exist == d
