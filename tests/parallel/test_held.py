"""What follows from a mask is kept by the numbers that its tensors hold, and for few of them."""

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import tilewise as tw
import tilewise.parallel as tp
from tilewise.parallel import held, plans, reach, shards
from tilewise.parallel.costs import Sizes, cost
from tilewise.parallel.exchange import answered
from tilewise.parallel.reach import reach_of


def documents(seed, N=32):
    ids = torch.randint(0, 4, (2, N), generator=torch.Generator().manual_seed(seed)).sort(1)[0]
    return tw.Causal() & tw.Documents(ids, ids)


MASKS = {
    "documents": documents,
    "prefix": lambda n: tw.Prefix(torch.tensor([3 + n, 4])),
    "padding": lambda n: tw.Padding(torch.tensor([9, 9 + n]), torch.tensor([n, 1])),
    "keys": lambda n: tw.Padding(torch.arange(32).expand(2, 32) > 3 * n),
    "spans": lambda n: tw.Spans(torch.full((2, 32), n), torch.full((2, 32), 20)),
    "window": lambda n: tw.Window(n, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_equal_numbers_are_held_as_equal_and_others_are_not(name):
    make = MASKS[name]
    one, same, other = (held.held(make(n)) for n in (1, 1, 2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != other
    assert held.held(tp.fixed(make(1))) == one
    assert reach_of(make(1), 32) is reach_of(make(1), 32)


def test_types_and_shapes_of_tensors_count():
    lengths = torch.tensor([3, 4])
    assert held.held(tw.Prefix(lengths)) != held.held(tw.Prefix(lengths.int()))
    rows = torch.zeros(2, 6, dtype=torch.int64)
    assert held.held(tw.Documents(rows, rows)) != held.held(tw.Documents(rows.view(1, 12), rows.view(1, 12)))
    assert held.held(tw.Documents(rows[:, :0], rows[:, :0]))[0].part.q_ids.shape == (2, 0)


def test_copies_are_its_own_and_few():
    ids = torch.zeros(2, 64, dtype=torch.int64)[:, ::2]  # with strides
    mask = tw.Documents(ids, ids)
    fixed, read = tp.fixed(mask), held.held(mask)
    ids.fill_(7)
    for part in (fixed, read[0].part, held.held(fixed)[0].part):
        assert not part.q_ids.any()
        assert part.q_ids.shape == (2, 32)
    assert held.held(mask) != read
    for seed in range(40):
        for N in (32, 48):
            plan = documents(seed, N)
            q = torch.zeros(2, N // 2, 1, 8)
            pieces = (((0, N // 2),), ((N // 2, N),))
            shards.shards_of(None, "ring", N, pieces, 0, 0, None, plan, (), {}, q)
    assert len(held.RECENT) == held.RECENT.maxlen
    for kept in (reach.reach, shards._made, held._check, plans._even):
        assert kept.cache_info().currsize <= kept.cache_info().maxsize <= 64


def test_a_dense_mask_of_a_ranks_rows_is_not_read():
    mask = tw.Causal() & tw.Dense(torch.ones(16, 32, dtype=torch.bool))
    assert [type(one.part) for one in held.held(mask)] == [tw.Causal]
    assert not reach_of(mask, 32).exact
    assert torch.equal(tp.fixed(mask).parts[1].seen, mask.parts[1].seen)
    assert tp.fixed(mask).parts[1].seen is not mask.parts[1].seen


def test_a_mask_that_is_not_known_may_hide_any_key():
    class Odd(tw.Mask):
        device, interval = "odd", False
        __match_args__ = ()

    assert not reach_of(Odd(), 32).exact


def test_only_errors_of_messages_are_named_so():
    with pytest.raises(RuntimeError, match="a view was created"), answered():
        raise RuntimeError("a view was created in no_grad mode")  # by autograd
    for error in (
        dist.DistNetworkError("it is gone"),
        RuntimeError("[.../third_party/gloo/gloo/transport/tcp/pair.cc]"),
    ):
        with pytest.raises(RuntimeError, match="a rank of the group does not answer any more"), answered():
            raise error


@pytest.mark.parametrize("N", [0, 1, 3])
def test_few_rows_cost_something_in_every_plan(N):
    for plan, inner in (("ulysses", 1), ("gather", 1), ("ring", 1), ("ring", 2)):
        assert 0.0 < cost(plan, inner, Sizes(N, 4, 4, 2, 8)).seconds < 1.0
