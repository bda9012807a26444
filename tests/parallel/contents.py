"""Cases of two ranks: what depends on the numbers of a mask's tensors follows them, however they were written."""

import gc
import weakref
from functools import partial

import numpy
import pytest
import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp
from tilewise.attention import reference
from tilewise.parallel import held

from .ranks import N, case, close, everyone, tensors

pair = partial(case, spawn="pair")
"""A case of two ranks that wait seconds for each other."""


def documents(ids):
    return tw.Causal() & tw.Documents(ids, ids)


def check(s, mask, ids, plan="ring"):
    """Compare o and all gradients of a call with the reference's for ids."""
    q, k, v, do, *_ = tensors(4, 2)
    own = [t.clone().requires_grad_() for t in s.shard((q, k, v))]
    o = tp.attention(*own, sharding=s, plan=plan, mask=mask)
    o.backward(s.shard(do))
    given = {"mask": documents(ids.clone())}
    close(o, s.shard(reference.attention(q, k, v, **given)[0]), 1e-12, "o")
    for t, x in zip(own, reference.gradients(q, k, v, do, **given)[:3], strict=True):
        close(t.grad, s.shard(x), 1e-12, "gradients")


def batch(runs=2):
    """Ids of so many documents in each of two batch entries, in memory that numpy can write, too."""
    memory = numpy.repeat(numpy.arange(runs), N // runs)[None].repeat(2, 0)
    return memory, torch.from_numpy(memory)


def by_numpy(memory, ids):
    memory[:] = 0


def by_data(memory, ids):
    ids.data.zero_()


def by_broadcast(memory, ids):
    dist.broadcast(torch.zeros_like(ids) if dist.get_rank() == 0 else ids, 0)
    memory[:] = 0


@pair
def ids_may_be_written_by_what_autograd_does_not_count(rank):
    for write in (by_numpy, by_data, by_broadcast):
        for again in (False, True):
            memory, ids = batch()
            s, mask = tp.Contiguous(everyone()), documents(ids)
            check(s, mask, ids)
            write(memory, ids)
            assert not ids.any()
            check(s, documents(ids) if again else mask, ids)


@pair
def balanced_keeps_its_cut_when_ids_are_written(rank):
    memory, ids = batch(16)
    s = tp.Balanced(everyone(), documents(ids), N, 4)
    pieces = s.pieces(N) if rank else None  # the other rank has not asked yet
    memory[:] = 0
    check(s, documents(ids), ids)
    assert pieces in (None, s.pieces(N))
    assert s == tp.Balanced(everyone(), documents(batch(16)[1]), N, 4)
    assert s != tp.Balanced(everyone(), documents(ids), N, 4)


@pair
def masks_of_inference_mode_run_and_serve_a_training_later(rank):
    q, k, v, *_ = tensors(4, 2)
    with torch.inference_mode():
        ids = batch(8)[1] * 1
        for s in (tp.Contiguous(everyone()), tp.Balanced(everyone(), documents(ids), N, 4)):
            o = tp.attention(*s.shard((q, k, v)), sharding=s, plan="ring", mask=documents(ids))
            close(o, s.shard(reference.attention(q, k, v, mask=documents(ids))[0]), 1e-12, "o")
        mask = tp.fixed(documents(ids))
    check(tp.Zigzag(everyone()), mask, ids)
    check(tp.Zigzag(everyone()), documents(ids), ids)
    tw.attention(q.clone().requires_grad_(), k, v, mask=mask).sum().backward()


@pair
def tensors_of_old_masks_are_freed(rank):
    s, alive = tp.Contiguous(everyone()), []
    q = s.shard(tensors(4, 2)[0])
    for runs in (2, 4, 8, 16, 32):
        ids = batch(runs)[1]
        alive.append(weakref.ref(ids))
        tp.attention(q, q, q, sharding=s, plan="ring", mask=documents(ids))
        tp.fixed(documents(ids))
        tp.Balanced(everyone(), documents(ids), N, 4).pieces(N)
    del ids
    gc.collect()
    assert [one() for one in alive] == [None] * 5


@pair
def a_fixed_mask_is_read_once_and_later_writes_do_not_reach_it(rank):
    memory, ids = batch()
    s, mask, true = tp.Zigzag(everyone()), tp.fixed(documents(ids)), ids.clone()
    memory[:] = 0
    reading, read = held._read, []
    held._read = lambda part: read.append(part) or reading(part)
    try:
        for layer in (mask, mask & tw.Window(N, 0), tp.fixed(mask)):
            check(s, layer, true)
        assert not [part for part in read if part.captures]
        for plan in ("gather", "halo", "ulysses"):
            check(s, mask, true, plan)
        assert not [part for part in read if part.captures]
        check(s, documents(ids), ids)
        assert len([part for part in read if part.captures]) == 1  # the backward has what the forward read
    finally:
        held._read = reading


@pair
def ids_written_between_forward_and_backward_are_an_error(rank):
    _, ids = batch()
    s = tp.Contiguous(everyone())
    q = s.shard(tensors(4, 2)[0]).clone().requires_grad_()
    for plan in ("ring", "gather", "halo", "ulysses"):
        o = tp.attention(q, q, q, sharding=s, plan=plan, mask=documents(ids))
        ids.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
