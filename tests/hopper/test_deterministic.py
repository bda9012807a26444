"""Who adds first to each tile of dQ: the last tile of keys that it sees, held against the mask written out."""

import pytest
import torch
import triton
from hopper.calls import problem

import tilewise as tw
from tilewise.hopper.backward.deterministic import attention_backward_init_semaphore, semaphore_range
from tilewise.host.arguments import cdiv
from tilewise.host.values import device_values
from tilewise.tile.ranges import Variant

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")

B_R, B_C, H = 64, 128, 2
MASKS = (tw.Full(), tw.Causal(), tw.Window(100, 20), tw.Causal() & tw.Window(200, 0), tw.Window(0, 0))


def given(mask, M, N, turn):
    """What the kernel writes for every query tile, head by head."""
    parts, *_ = device_values(problem(M, N, 64, mask=mask), ())
    blocks, tiles = cdiv(M, B_R), cdiv(N, B_C)
    dq_semaphore = torch.full((H, blocks), -1, dtype=torch.int32)
    attention_backward_init_semaphore[(H * tiles,)](
        dq_semaphore, None, Variant(parts, (), None, None), M, N, H, tiles, blocks, B_R, B_C, turn
    )
    return dq_semaphore.tolist()


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(("M", "N"), [(512, 512), (300, 700), (700, 300), (65, 129)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_first_to_add_is_the_last_tile_that_is_seen(mask, M, N, turn):
    """Of the query tiles of a turn the first one's number says so, and the others' say nothing."""
    keys = [rows.any(0).nonzero() for rows in mask.dense(M, N).split(turn * B_R)]
    wanted = [int(j.max()) // B_C if len(j) else -1 for j in keys]
    for head in given(mask, M, N, turn):
        assert head[::turn] == wanted
        assert turn == 1 or set(head[1::turn]) <= {-1}


@triton.jit
def ask(found, variant, t, M, N, B_R: triton.language.constexpr, B_C: triton.language.constexpr):
    begin, end = semaphore_range(variant, 0, t, M, N, B_R, B_C, 2)
    triton.language.store(found, begin)
    triton.language.store(found + 1, end)


@pytest.mark.parametrize(("M", "N"), [(3072, 653), (512, 512), (64, 512)])
def test_a_tile_of_padded_keys_has_no_turn(M, N):
    """Padding's interval of rows begins at 2^30 for a padded key, and at an odd tile if M - N is odd, too."""
    lengths = torch.tensor([200], dtype=torch.int32)
    mask = tw.Causal() & tw.Padding(lengths)
    p = problem(M, N, 64, batch=(1,), mask=mask)
    parts, *_ = device_values(p, (lengths,))
    for t in range(cdiv(N, B_C)):
        found = torch.empty(2, dtype=torch.int32)
        ask[(1,)](found, Variant(parts, (), None, None), t, M, N, B_R, B_C)
        assert (found[0] < found[1]) == (t * B_C < 200), t
