"""What rows see of masks that are functions: no visible key is left out, and of our rules, no other is taken in."""

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from program import masks as users

import tilewise as tw
from tilewise.parallel import reach
from tilewise.parallel.reach import reach_of

N = 48
USERS = users.masks(N)
LENGTHS = torch.tensor([20, 45])
ENDS = [torch.randint(0, N + 1, (2, N), generator=torch.Generator().manual_seed(n)).sort(1)[0] for n in range(2)]
OURS = {
    "prefix": tw.Prefix(LENGTHS),
    "padding": tw.Padding(LENGTHS),
    "padding on both sides": tw.Padding(LENGTHS, torch.tensor([3, 9])),
    "spans": tw.Spans(*ENDS),
    "causal and prefix": tw.Causal() & tw.Prefix(LENGTHS),
}


def entries(found):
    """The entries between first keys and ends, (B or 1, N, N)."""
    starts, ends = found.intervals()
    j = torch.arange(N)
    return (starts[:, :, None] <= j) & (j < ends[:, :, None])


@pytest.mark.parametrize("at_most", [1 << 20, 256], ids=["of entries", "of tiles"])
@pytest.mark.parametrize("name", USERS)
def test_no_visible_key_is_left_out(name, at_most, monkeypatch):
    monkeypatch.setattr(reach, "TILES", at_most)
    reach.reach.cache_clear()
    mask = tw.Mask.of(USERS[name])
    found = reach_of(mask, N, users.B, users.H)
    seen = mask.dense(N, N, users.B, users.H).expand(users.B, users.H, N, N)
    taken = entries(found)[:, None].expand_as(seen)
    assert not (seen & ~taken).any()
    if found.exact:
        assert torch.equal(seen, taken)
    for i in range(N):
        assert found.first(i) <= int(seen[:, :, i:].any(0).any(0).any(0).int().argmax())
        assert all(int(row.max(initial=0)) <= found.end(i) for row in [(seen[:, :, i].nonzero()[:, 2] + 1).numpy()])


@pytest.mark.parametrize("name", OURS)
def test_our_intervals_are_exact(name):
    mask = OURS[name]
    found = reach_of(mask, N, 2, 4)
    assert found.exact
    assert torch.equal(entries(found), mask.dense(N, N)[:, 0])
    assert reach_of(mask, N).counts().equal(found.counts())  # the tensors say how many batch entries there are


def test_heads_and_batch_entries_are_those_of_the_call():
    by_head = tw.Mask.of(lambda b, h, i, j: (j <= i) & (i - j <= h))
    for heads in (1, 3, 8):
        assert reach_of(by_head, N, 2, heads).counts()[-1] == heads
    by_batch = tw.Mask.of(lambda b, h, i, j: j <= b)
    assert torch.equal(reach_of(by_batch, N, 5, 1).intervals()[1][:, 0], torch.arange(1, 6))


def test_a_whole_without_rows_sees_nothing():
    for mask in (tw.Mask.of(lambda b, h, i, j: j <= i), tw.Mask.of(lambda b, h, i, j: (i * j) % 7 == 1)):
        assert reach_of(mask, 0).intervals()[0].shape == (1, 0)
