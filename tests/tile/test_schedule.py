"""The order of tiles that docs/pictures draws is the kernels'."""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tilewise.tile.schedule import assign, assign_each

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "pictures"))
import pipelines

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")


@triton.jit
def assigned(found, tiles, heads, section, order: tl.constexpr):
    """What each program is given."""
    matrix, tile = order(tl.program_id(0), tiles, heads, section)
    tl.store(found + 2 * tl.program_id(0), matrix)
    tl.store(found + 2 * tl.program_id(0) + 1, tile)


@pytest.mark.parametrize(("tiles", "heads", "section"), [(8, 4, 16), (3, 5, 2), (1, 7, 3)])
def test_the_drawn_order_is_the_kernels(tiles, heads, section):
    found = torch.empty(tiles * heads, 2, dtype=torch.int32)
    assigned[(tiles * heads,)](found, tiles, heads, section, assign)
    drawn = [pipelines.assign(t, tiles, heads, section) for t in range(tiles * heads)]
    assert [tuple(pair) for pair in found.tolist()] == drawn
    assert len(set(drawn)) == tiles * heads


def test_without_sections_one_matrix_runs_after_the_other():
    found = torch.empty(2, 5 * 7, 2, dtype=torch.int32)
    for into, order in zip(found, (assign, assign_each), strict=True):
        assigned[(5 * 7,)](into, 5, 7, 1, order)
    assert torch.equal(*found)
