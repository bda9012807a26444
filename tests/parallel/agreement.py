"""Cases of ranks that hold few rows, or that do not agree: each is right on every rank, or an error on every rank."""

import pytest
import torch

import tilewise as tw
import tilewise.parallel as tp
from tilewise import reference

from .contents import pair
from .ranks import MESH, D, case, close, everyone, generator


def few_rows(s, kind, heads=8):
    """Return the whole's q, k, v and do, and the options of the whole and of the rank, with one row or so a rank."""
    N, g = s.length, generator()
    x = [torch.randn(2, N, heads, D, generator=g).double() for _ in range(4)]
    bias, seen = torch.randn(heads, N, N, generator=g).double(), torch.eye(N, dtype=torch.bool)
    of_whole = {"bias": {"score": (tw.Bias(bias),)}, "dense": {"mask": tw.Dense(seen)}, "none": {}}
    own = {"bias": {"score": tw.Bias(s.shard(bias, 1))}, "dense": {"mask": tw.Dense(s.shard(seen, 0))}, "none": {}}
    return x, of_whole[kind], own[kind]


def check(s, plan, kind):
    """Compare o and gradients of few rows with the reference's."""
    x, of_whole, own = few_rows(s, kind)
    mine = [t.clone().requires_grad_() for t in s.shard(x[:3])]
    o = tp.attention(*mine, sharding=s, plan=plan, **own)
    o.backward(s.shard(x[3]))
    close(o, s.shard(reference.attention(*x[:3], **of_whole)[0]), 1e-12, f"{plan} {kind}")
    for t, true in zip(mine, reference.gradients(*x, **of_whole), strict=False):
        close(t.grad, s.shard(true), 1e-12, f"{plan} {kind} gradient")


def refused(s, plan, kind, words):
    x, _, own = few_rows(s, kind)
    with pytest.raises(ValueError, match=words):
        tp.attention(*s.shard(x[:3]), sharding=s, plan=plan, **own)


@pair
def one_row_of_a_bias_or_a_dense_mask_is_the_ranks_own(rank):
    for kind in ("bias", "dense"):
        for length in (2, 3):
            s = tp.Contiguous(everyone(), length)
            refused(s, "ulysses", kind, f"{kind.capitalize()} has .*row")
            for plan in ("ring", "gather", None):
                check(s, plan, kind)


@case
def one_row_of_a_bias_or_a_dense_mask_is_no_broadcast_for_a_grid(rank):
    for kind in ("bias", "dense"):
        refused(tp.Contiguous(MESH[0], 4), tp.Grid(2, 2), kind, f"{kind.capitalize()} has one row")
        refused(tp.Contiguous(MESH[0], 9), tp.Grid(2, 2), kind, f"{kind.capitalize()} has rows")
