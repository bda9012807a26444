"""What the ranks of each spawn run, case by case; test_parallel.py reads what they wrote.

A case is a function of the rank. It raises on what is wrong, after its last message, so that the others go on.

python -m tests.parallel.ranks exact FOLDER    results of four ranks, each against the reference or one device
python -m tests.parallel.ranks models FOLDER   models and DTensors on four ranks
python -m tests.parallel.ranks six FOLDER      six ranks
python -m tests.parallel.ranks pair FOLDER     two ranks: contents.py, agreement.py
python -m tests.parallel.ranks functions FOLDER   four ranks: functions.py
"""

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tilewise as tw
import tilewise.parallel as tp
from tilewise.attention import reference
from tilewise.parallel.check import same_seed
from tilewise.parallel.exchange import gathered

from . import forked

RANKS = 4
B, N, D = 2, 64, 8
HEADS = ((4, 2), (4, 4), (4, 1))
SPAWNS = {"exact": RANKS, "models": RANKS, "six": 6, "pair": 2, "functions": RANKS}
"""How many processes each spawn has."""
ANSWER = timedelta(minutes=4)
"""After which a rank that waits gives up, so that a hang is a failure, also on a busy machine."""
CASES: dict[str, dict[str, Callable[[int], None]]] = {spawn: {} for spawn in SPAWNS}
"""By spawn, and by name."""
GROUPS: dict[int, object] = {}
MESH: list[DeviceMesh] = []


def case(run, spawn="exact"):
    """Add a case under the function's name."""
    CASES[spawn][run.__name__] = run
    return run


def everyone():
    return dist.group.WORLD


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


@lru_cache(None)
def tensors(H, H_k, length=N, dtype=torch.float64):
    """q, k, v, do, dlse and a sink, fp32 numbers in a type."""
    g = generator()
    shapes = (B, length, H, D), (B, length, H_k, D), (B, length, H_k, D), (B, length, H, D), (B, H, length), (H,)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


@lru_cache(None)
def ids(length=N):
    return torch.randint(0, 6, (B, length), generator=generator(3)).sort(1)[0]


@lru_cache(None)
def masks(length=N):
    g, own = generator(5), ids(length)
    lo, hi = (torch.randint(0, length + 1, (B, length), generator=g).sort(1)[0].int() for _ in range(2))
    mixed = torch.randint(0, 4, (B, length), generator=g)
    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.Causal() & tw.Window(11, 0),
        "two sides": tw.Window(9, 20),
        "prefix": tw.Prefix(torch.tensor([20, 45])),
        "padding": tw.Causal() & tw.Padding(torch.tensor([50, 12])),
        "padding bool": tw.Padding(torch.rand(B, length, generator=g) > 0.4),
        "documents": tw.Causal() & tw.Documents(own, own),
        "documents mixed": tw.Documents(mixed, mixed),
        "documents window": tw.Causal() & tw.Window(6, 0) & tw.Documents(own, own),
        "spans": tw.Spans(lo, hi),
    }


def plans(chunk=4):
    """Every plan with every sharding, whose chunks are of so many rows."""
    group, packed = everyone(), tw.Causal() & tw.Documents(ids(), ids())
    for plan, on in (("ring", group), ("gather", group), ("halo", group), ("ulysses", group), (tp.Grid(2, 2), MESH[0])):
        for s in (tp.Zigzag(on), tp.Contiguous(on), tp.Striped(on, chunk), tp.Balanced(on, packed, N, chunk)):
            yield plan, s


def close(found, expected, bound, what):
    """Compare by the largest entry; infinities are where they should be."""
    assert torch.equal(found.isinf(), expected.isinf()), what
    a, b = (t.detach().double().masked_fill(expected.isinf(), 0.0) for t in (found, expected))
    error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) if a.numel() else 0.0
    assert error <= bound, f"{what}: {error:.1e}"


@lru_cache(None)
def truth(name, H, H_k, extras):
    q, k, v, do, dlse, sink = tensors(H, H_k)
    options = {"mask": masks()[name], "sink": sink}
    if extras:
        options["score"] = tw.SoftCap(3.0), tw.Alibi(torch.linspace(0.1, 0.5, H))
        options |= {"dropout": 0.25, "seed": 9}
    o, lse = reference.attention(q, k, v, **options)
    gradients = reference.gradients(q, k, v, do, dlse.masked_fill(lse.isinf(), 0.0), **options)
    return options, o, lse, gradients


def results(plan, s, name, H, H_k, dtype, extras=False):
    """Return o, lse and all gradients, each with the reference's; the bound; and what the call is called."""
    q, k, v, do, dlse, sink = tensors(H, H_k)
    options, o_t, lse_t, g = truth(name, H, H_k, extras)
    own = [t.clone().to(dtype).requires_grad_() for t in s.shard((q, k, v))]
    sink = sink.clone().to(dtype).requires_grad_()
    o, lse = tp.attention(*own, sharding=s, plan=plan, return_lse=True, **options | {"sink": sink})
    own_dlse = s.shard(dlse, 2).masked_fill(s.shard(lse_t, 2).isinf(), 0.0)
    torch.autograd.backward((o, lse), (s.shard(do).to(dtype), own_dlse.to(dtype)))
    bound, label = 1e-12 if dtype == torch.float64 else 2e-5, f"{plan} {type(s).__name__} {name} {H}/{H_k}"
    pairs = [
        (o, s.shard(o_t)),
        (lse, s.shard(lse_t, 2)),
        *((t.grad, s.shard(x)) for t, x in zip(own, g[:3], strict=True)),
    ]
    return [*pairs, (sink.grad, g.sink)], bound, label


def check_all(rows):
    """Compare calls' results with the reference's; the sinks' shares are summed over the ranks together."""
    rows = list(rows)
    shares = torch.stack([found[-1][0].double() for found, *_ in rows])
    dist.all_reduce(shares)
    for (found, bound, label), share in zip(rows, shares, strict=True):
        for n, (mine, theirs) in enumerate([*found[:-1], (share, found[-1][1])]):
            close(mine, theirs, bound, f"{label} result {n}")


KINDS = [(heads, dtype) for heads in HEADS for dtype in (torch.float64, torch.float32)]


@case
def every_plan_sharding_mask_heads_and_type(rank):
    met = []
    for n, (plan, s) in enumerate(plans()):  # any two of a plan with its sharding, a mask and a kind meet
        rows = [(name, KINDS[(n + m) % 6]) for m, name in enumerate(masks())]
        check_all([results(plan, s, name, *heads, dtype) for name, (heads, dtype) in rows])
        met += [(n, *row) for row in rows]
    assert len({(n, name) for n, name, _ in met}) == 20 * 11
    assert len({(n, kind) for n, _, kind in met}) == 20 * len(KINDS)
    assert len({(name, kind) for _, name, kind in met}) == 11 * len(KINDS)


@case
def dropout_alibi_and_caps_draw_and_see_what_one_device_does(rank):
    names = ("causal", "documents", "prefix", "padding bool")
    for n, (plan, s) in enumerate(plans(8)):  # a Latin square, twice: every plan, and every sharding, meets every mask
        check_all([results(plan, s, names[(n + n // 4 + m) % 4], 4, 2, torch.float64, True) for m in range(2)])


def check_uneven(plan, s):
    """Compare o, lse and gradients of a length that does not divide with the reference."""
    q, k, v, do, *_ = tensors(6, 2, s.length)
    mask = tw.Causal() & tw.Window(30, 0)
    o_t, lse_t = reference.attention(q, k, v, mask=mask)
    g = reference.gradients(q, k, v, do, mask=mask)
    own = [t.clone().requires_grad_() for t in s.shard((q, k, v))]
    o, lse = tp.attention(*own, sharding=s, plan=plan, mask=mask, return_lse=True)
    o.backward(s.shard(do))
    close(o, s.shard(o_t), 1e-12, plan)
    close(lse, s.shard(lse_t, 2), 1e-12, plan)
    for t, x in zip(own, g[:3], strict=True):
        close(t.grad, s.shard(x), 1e-12, plan)
    assert torch.equal(s.unshard(s.shard(q)), q)


def uneven(on, length=61):
    """Shardings with pieces of several sizes."""
    return tp.Contiguous(on, length), tp.Zigzag(on, length), tp.Striped(on, 5, length)


@case
def pieces_of_several_sizes_on_two_and_three_ranks(rank):
    checked = 0
    for size in (2, 3):
        for plan in ("ring", "gather", "halo", "ulysses") if rank < size else ():
            for s in uneven(GROUPS[size]):
                check_uneven(plan, s)
                checked += 1
    assert checked == 12 * ((rank < 2) + (rank < 3))


@partial(case, spawn="six")
def pieces_of_several_sizes_on_six_ranks(rank):
    whole = [(plan, everyone()) for plan in ("ring", "gather", "halo", "ulysses")]
    grids = [(tp.Grid(u, r), init_device_mesh("cpu", (r, u))) for u, r in ((2, 3), (3, 2), (6, 1))]
    for plan, on in whole + grids:
        for s in uneven(on):
            check_uneven(plan, s)


@case
def rows_of_biases_and_dense_masks_are_the_ranks_own(rank):
    q, k, v, do, *_ = tensors(4, 2)
    g = generator(2)
    bias, alike = torch.randn(B, 4, N, N, generator=g).double(), torch.randn(4, 1, N, generator=g).double()
    seen = torch.rand(1, 4, N, N, generator=g) > 0.3
    mask = tw.Causal() & tw.Dense(seen)
    scores = tw.Bias(bias), tw.Bias(alike)
    o_t, _ = reference.attention(q, k, v, mask=mask, score=scores)
    true = reference.gradients(q, k, v, do, mask=mask, score=scores)
    for plan, s in plans():
        if plan not in ("ring", "gather", "halo"):
            continue  # the others refuse rows of their own
        own = [t.clone().requires_grad_() for t in s.shard((q, k, v))]
        rows, same = s.shard(bias, 2).requires_grad_(), alike.clone().requires_grad_()
        local = tw.Causal() & tw.Dense(s.shard(seen, 2))
        o = tp.attention(*own, sharding=s, plan=plan, mask=local, score=(tw.Bias(rows), tw.Bias(same)))
        o.backward(s.shard(do))
        dist.all_reduce(same.grad)
        close(o, s.shard(o_t), 1e-12, plan)
        close(rows.grad, s.shard(true.scores[0], 2), 1e-12, "dbias of rows")
        close(same.grad, true.scores[1], 1e-12, "dbias that is alike for all")
        for t, x in zip(own, true[:3], strict=True):
            close(t.grad, s.shard(x), 1e-12, plan)
    s = tp.Contiguous(everyone())
    own, same = [t.clone() for t in s.shard((q, k, v))], alike.clone().requires_grad_()
    o = tp.attention(*own, sharding=s, plan="ulysses", score=tw.Bias(same))
    o.backward(s.shard(do))
    dist.all_reduce(same.grad)
    close(same.grad, reference.gradients(q, k, v, do, score=(tw.Bias(alike),)).scores[0], 1e-12, "dbias over heads")


@case
def ulysses_is_one_device_bit_by_bit_and_gather_and_halo_in_o(rank):
    group, bf16, length = everyone(), torch.bfloat16, 2048
    tiled = tw.Causal() & tw.Window(length, 0)  # torch's fused kernel, which takes Causal alone, sums in another order
    calls = [
        ("ulysses", tp.Contiguous(group), torch.float32, tw.Causal(), N),
        ("ulysses", tp.Zigzag(group), bf16, tiled, N),
    ]
    calls += [(plan, tp.Zigzag(group), bf16, tw.Causal(), length) for plan in ("gather", "halo")]  # bf16 never takes it
    alike = []
    for plan, s, dtype, mask, size in calls:
        whole = [t.clone().to(dtype).requires_grad_() for t in tensors(8, 4, size)[:3]]
        do = tensors(8, 4, size)[3].to(dtype)
        o = tw.attention(*whole, mask=mask)
        own = [s.shard(t.detach()).requires_grad_() for t in whole]
        mine = tp.attention(*own, sharding=s, plan=plan, mask=mask)
        alike.append(torch.equal(mine, s.shard(o)))
        if plan == "ulysses":
            grads, found = torch.autograd.grad(o, whole, do), torch.autograd.grad(mine, own, s.shard(do))
            alike += map(torch.equal, found, s.shard(grads))
    assert all(alike), alike


@case
def bytes_are_what_the_mask_needs_and_windows_talk_to_neighbours(rank):
    q, k, v, *_ = tensors(4, 2)
    group = everyone()
    for s in (tp.Contiguous(group), tp.Zigzag(group), tp.Striped(group, 4)):
        for name in ("causal", "window", "documents", "documents window", "spans"):
            mask = masks()[name]
            pieces = s.pieces(N)
            seen = mask.dense(N, N).expand(B, 1, N, N).any(0)[0]
            for plan, needs in (("ring", hulls_of_keys), ("halo", hulls_of_rows)):
                with tp.count_bytes() as sent:
                    tp.attention(*s.shard((q, k, v)), sharding=s, plan=plan, mask=mask)
                for to in range(RANKS):
                    needed = int(needs(seen, pieces[to], pieces[rank]).sum()) if to != rank else 0
                    assert sent[to] == needed * B * 2 * 2 * D * 8, (plan, type(s).__name__, name, rank, to)
                if name == "window" and isinstance(s, tp.Contiguous):
                    assert set(+sent) <= {rank + 1}


def hulls_of_keys(seen, rows, keys):
    """Which keys "ring" sends: of each piece what lies between the first and the last that some row sees."""
    needed = torch.zeros(N, dtype=torch.bool)
    at = torch.cat([torch.arange(a, b) for a, b in rows])
    for a, b in keys:
        if len(hit := seen[at, a:b].any(0).nonzero()):
            needed[a + int(hit.min()) : a + int(hit.max()) + 1] = True
    return needed


def hulls_of_rows(seen, rows, keys):
    """Which keys "halo" sends: those of the rank between the first and the last that a piece of rows sees."""
    needed, own = torch.zeros(2, N, dtype=torch.bool)
    for a, b in rows:
        if len(hit := seen[a:b].any(0).nonzero()):
            needed[int(hit.min()) : int(hit.max()) + 1] = True
    for a, b in keys:
        own[a:b] = True
    return needed & own


@case
def random_masks_never_wait_for_ever(rank):
    g, group = generator(17), everyone()
    q, k, v, do, *_ = tensors(4, 2)
    for _ in range(8):
        lo, hi = (torch.randint(0, N + 1, (B, N), generator=g).sort(1)[0].int() for _ in range(2))
        own = torch.randint(0, 9, (B, N), generator=g)
        mask = (tw.Spans(lo, hi), tw.Documents(own, own), tw.Window(int(lo[0, 3]), int(hi[0, 5])))[int(own[0, 0]) % 3]
        s = (tp.Contiguous(group), tp.Zigzag(group), tp.Striped(group, 2))[int(own[0, 1]) % 3]
        true, gradient = reference.attention(q, k, v, mask=mask)[0], reference.gradients(q, k, v, do, mask=mask).k
        for plan in ("ring", "halo"):
            x = [t.clone().requires_grad_() for t in s.shard((q, k, v))]
            o = tp.attention(*x, sharding=s, plan=plan, mask=mask)
            o.backward(s.shard(do))
            close(o, s.shard(true), 1e-12, f"{plan} {mask}")
            close(x[1].grad, s.shard(gradient), 1e-12, f"{plan} dk")


@case
def disagreement_raises_on_every_rank(rank):
    s = tp.Zigzag(everyone())
    own = s.shard(tuple(t.float() for t in tensors(4, 2)[:3]))
    for options in (
        {"scale": 0.5 + (rank == 3)},
        {"mask": tw.Window(3 + (rank == 0), 0)},
        {"plan": ("ring", "gather")[rank % 2]},
    ):
        with pytest.raises(ValueError, match="must be alike on every rank"):
            tp.attention(*own, sharding=s, **{"plan": "ring", **options})


WRONG = {
    "other rows": (lambda s, q: tp.attention(q[:, 1:], q[:, 1:], q[:, 1:], sharding=s), "multiple of 8"),
    "cached keys": (lambda s, q: tp.attention(q, q.repeat(1, 2, 1, 1), q.repeat(1, 2, 1, 1), sharding=s), "caches"),
    "a length that does not divide": (lambda s, q: s.shard(torch.zeros(1, 30)), "multiple of 8"),
    "a mask of another length": (
        lambda s, q: tp.attention(q, q, q, sharding=s, mask=tw.Documents(ids(32), ids(32))), "the whole's shape",
    ),
    "heads": (lambda s, q: tp.attention(*[q[:, :, :3]] * 3, sharding=s, plan="ulysses"), "do not divide"),
    "a layout": (lambda s, q: tp.attention(q, q, q, sharding=s, origin=tw.Origin()), "origin must be None"),
    "numbers of a layer": (
        lambda s, q: tp.attention(q, q, q, sharding=s, precision=tw.EightBits("int8")), "precision must be None or a n",
    ),
    "no sharding": (lambda s, q: tp.attention(q, q, q, sharding=None), "sharding must be"),
    "a mask to cut by": (
        lambda s, q: tp.Balanced(everyone(), tw.Documents(ids(32), ids(32)), N, 4), "Balanced: mask must be of 64 rows",
    ),
    "a plan": (lambda s, q: tp.attention(q, q, q, sharding=s, plan="tree"), "plan must be"),
    "a grid": (lambda s, q: tp.attention(q, q, q, sharding=s, plan=tp.Grid(2, 2)), "needs a mesh"),
    "an option": (lambda s, q: tp.attention(q, q, q, sharding=s, causal=True), "did you mean mask"),
    "key heads": (lambda s, q: tp.attention(q, q[:, :, :3], q[:, :, :3], sharding=s), "multiple of k's"),
    "a whole bias": (
        lambda s, q: tp.attention(q, q, q, sharding=s, score=tw.Bias(torch.zeros(N, N))), "the rank's 16 rows",
    ),
    "rows of a bias over heads": (
        lambda s, q: tp.attention(q, q, q, sharding=s, plan="ulysses", score=tw.Bias(torch.zeros(16, N))), "has rows",
    ),
}  # fmt: skip


@case
def wrong_use_raises_before_anything_is_sent(rank):
    s, q = tp.Zigzag(everyone()), torch.zeros(B, N // RANKS, 4, D)
    for name, (attempt, word) in WRONG.items():
        with tp.count_bytes() as sent, pytest.raises((TypeError, ValueError), match=re.escape(word)):
            attempt(s, q)
        assert not sent, name


def check_graph(plan, s):
    """Compare a call in one graph, and a checkpointed one, with the call itself, bit by bit; gradients, too."""
    packed, g = ids().clone(), generator(6)
    alike, sink = torch.randn(4, 1, N, generator=g), torch.randn(4, generator=g)
    options = {"mask": tw.Causal() & tw.Documents(packed, packed), "dropout": 0.2, "seed": 3}
    own = [t.float().requires_grad_() for t in (*s.shard(tuple(tensors(4, 2)[:3])), sink, alike)]

    def call(q, k, v, sink, bias):
        score = tw.SoftCap(4.0), tw.Bias(bias)
        return tp.attention(q, k * 1.0, v, sharding=s, plan=plan, sink=sink, score=score, **options) * 2.0

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found = [compiled(*own), call(*own), checkpoint(call, *own, use_reentrant=False)]
    grads = [torch.autograd.grad(o.sum(), own) for o in found]
    for o, grad in zip(found[1:], grads[1:], strict=True):
        assert torch.equal(found[0], o), plan
        assert all(map(torch.equal, grads[0], grad)), plan


@case
def every_plan_agrees_under_checkpoints_and_compiles_in_one_graph(rank):
    check_graph(tp.Grid(2, 2), tp.Contiguous(MESH[0]))  # has a ring
    plan = "halo" if rank < 2 else "ulysses"  # tracing takes seconds, so a pair of ranks does each
    check_graph(plan, tp.Zigzag(MESH[0].get_group(1)))


@partial(case, spawn="models")
def a_graph_is_made_again_for_another_length(rank):
    s = tp.Zigzag(everyone())
    for plan in ("gather", None):

        def call(q, plan=plan):
            return tp.attention(q, q, q, sharding=s, plan=plan, mask=tw.Causal() & tw.Window(9, 0))

        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for length in (N, 2 * N):
            q, *_ = tensors(4, 4, length)
            true = reference.attention(q, q, q, mask=tw.Window(9, 0) & tw.Causal())[0]
            close(compiled(s.shard(q)), s.shard(true), 1e-12, f"{length} rows, {plan}")


@case
def two_models_at_once_and_a_seed_that_is_drawn(rank):
    one, two = tp.Zigzag(everyone()), tp.Contiguous(everyone())
    q, k, v, *_ = tensors(4, 2)
    first = tp.attention(*one.shard((q, k, v)), sharding=one, plan="ring", mask=tw.Causal())
    second = tp.attention(*two.shard((q, k, v)), sharding=two, plan="gather", mask=tw.Window(5, 5))
    close(one.unshard(first), reference.attention(q, k, v, mask=tw.Causal())[0], 1e-12, "one")
    close(two.unshard(second), reference.attention(q, k, v, mask=tw.Window(5, 5))[0], 1e-12, "two")
    seeds = gathered([int(same_seed(None, q.device, one)) for _ in range(2)], one.axes)
    assert seeds == [seeds[0]] * RANKS
    assert seeds[0][0] != seeds[0][1]
    dropped = tp.attention(*one.shard((q, k, v)), sharding=one, plan="ring", dropout=0.5)
    assert not torch.equal(one.unshard(dropped), reference.attention(q, k, v)[0])


@case
def rows_come_together_again_and_gradients_go_apart(rank):
    for s in (tp.Zigzag(everyone()), tp.Contiguous(everyone(), 61), tp.Zigzag(MESH[0])):
        length = s.global_length or N
        x = torch.arange(2.0 * length).view(2, length)
        own = s.shard(x).requires_grad_()
        whole = s.unshard(own)
        assert torch.equal(whole, x)
        (whole * (rank + 1) * x).sum().backward()
        assert torch.equal(own.grad, s.shard(x) * 10)
        assert torch.equal(s.positions(length), s.shard(torch.arange(length), 0))
        tokens, weights = s.shard((x.long(), x), 1)
        assert torch.equal(tokens, weights.long())


@case
def explain_shows_costs_work_and_refusals(rank):
    s = tp.Zigzag(everyone())
    q = torch.zeros(1, N // RANKS, 6, D)
    found = tp.explain(q, q, q, sharding=s, mask=tw.Causal())
    assert set(found.costs) == {"gather", "ring", "halo"}
    assert found.plan in found.costs
    assert any("do not divide" in reason for reason in found.refusals["ulysses"])
    assert found.work == [found.work[0]] * RANKS
    assert sum(found.work) == N * (N + 1) / 2
    uneven = tp.explain(q, q, q, sharding=tp.Contiguous(everyone()), mask=tw.Causal())
    assert max(uneven.work) / sum(uneven.work) == pytest.approx(0.4375, rel=0.01)
    assert uneven.costs["gather"].seconds > found.costs["gather"].seconds
    assert "model" in str(found)
    assert "chosen" in str(found)


@partial(case, spawn="models")
def dtensors_of_batches_and_heads_run_on_each_rank_s_part(rank):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    g, one, grid = generator(4), init_device_mesh("cpu", (RANKS,)), MESH[0]
    shapes = (4, 16, 8, D), (4, 16, 4, D), (4, 16, 4, D), (4, 16, 8, D)
    *whole, do = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    slopes, sink, bias = (torch.randn(n, generator=g, dtype=torch.float64) for n in ((8,), (8,), (8, 16, 16)))
    documents, lengths = torch.randint(0, 3, (4, 16), generator=g), torch.tensor([16, 3, 9, 0])
    learned = [*whole, sink, bias]
    lists, first = torch.randint(-1, 4, (4, 8, 4, 4), generator=g), torch.randint(0, 9, (1, 8, 16, 2), generator=g)
    by_head = tw.Blocks(lists, 4) & tw.Spans(first, first + 7)
    calls = [
        ({"mask": tw.Documents(documents, documents), "score": tw.Alibi(slopes.float()), "sink": sink}, 4),
        ({"mask": by_head, "sink": sink}, 4),
        ({"mask": tw.Padding(lengths), "score": tw.Bias(bias), "sink": sink, "dropout": 0.3, "seed": 5}, 5),
    ]
    places = [(one, [Shard(0)]), (one, [Shard(2)]), (one, [Replicate()]), (one, [Shard(1)])]
    places += [(grid, [Shard(0), Shard(2)]), (grid, [Shard(2), Shard(2)]), (grid, [Replicate(), Shard(0)])]
    for options, count in calls:
        plain = [t.clone().requires_grad_() for t in learned[:count]]
        o, lse = tw.attention(*plain[:3], **with_learned(options, plain), return_lse=True)
        expected = torch.autograd.grad((o, lse), plain, (do, torch.ones_like(lse).masked_fill(lse.isinf(), 0.0)))
        for mesh, at in places[: 2 if count == 4 else None]:
            alike = [Replicate()] * mesh.ndim
            x = [distribute_tensor(t, mesh, at if n < 3 else alike).requires_grad_() for n, t in enumerate(plain)]
            mine, logs = tw.attention(*x[:3], **with_learned(options, x), return_lse=True)
            given = [distribute_tensor(t, mesh, alike) for t in (do, torch.ones_like(lse).masked_fill(lse.isinf(), 0))]
            found = torch.autograd.grad((mine, logs), x, [t.redistribute(mesh, to.placements) for t, to in
                                                          zip(given, (mine, logs), strict=True)])  # fmt: skip
            assert mine.placements == tuple(p if p != Shard(1) else Replicate() for p in at)
            close(mine.full_tensor(), o, 1e-12, f"{at} o")
            close(logs.full_tensor(), lse, 1e-12, f"{at} lse")
            for n, (grad, true) in enumerate(zip(found, expected, strict=True)):
                assert isinstance(grad, DTensor)
                close(grad.full_tensor(), true, 1e-12, f"{at} gradient {n}")
    x = [distribute_tensor(t, one, [Shard(2)]).requires_grad_() for t in whole]
    compiled = torch.compile(lambda *t: tw.attention(*t, mask=tw.Causal()), backend="aot_eager", fullgraph=True)
    close(compiled(*x).full_tensor(), reference.attention(*whole, mask=tw.Causal())[0], 1e-12, "compiled")


def with_learned(options, x):
    """Options whose sink and bias are the tensors behind q, k and v in x."""
    sink = {"sink": x[3]} if "sink" in options else {}
    return options | sink | ({"score": tw.Bias(x[4])} if len(x) > 4 else {})


class Layer(nn.Module):
    """Attention of one sequence over the ranks of a sharding, or of one rank."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 32), nn.Linear(32, 96), nn.Linear(32, 20)
        self.sink = nn.Parameter(torch.zeros(4))

    def forward(self, tokens, sharding=None):
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 4, 8)).unbind(2)
        options = {"mask": tw.Causal(), "sink": self.sink}
        if sharding is None:
            o = tw.attention(q, k, v, **options)
        else:
            o = tp.attention(q, k, v, sharding=sharding, plan="ring", **options)
        return self.out(o.flatten(2))


def steps(model, optimizer, count, share=lambda x: x, sharding=None, group=None):
    """Losses of some steps on a batch of two sequences; all ranks of the group sum theirs."""
    tokens = torch.randint(0, 20, (B, N + 1), generator=generator(8))
    losses = []
    for _ in range(count):
        own, labels = (share(t.contiguous()) for t in (tokens[:, :-1], tokens[:, 1:]))
        logits = model(own, sharding)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (B * N)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if sharding is not None:
            dist.all_reduce(total, group=group)
        losses.append(total)
    return torch.stack(losses)


@partial(case, spawn="models")
def fsdp_shards_weights_over_both_dimensions_and_resumes_on_fewer_ranks(rank):
    def made(mesh):
        torch.manual_seed(3)
        model = Layer().double()
        if mesh is not None:
            fully_shard(model, mesh=mesh)
            model.set_gradient_divide_factor(1.0)  # shares sum; FSDP's own choice is their mean
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    expected = steps(*made(None), 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat, s = mesh._flatten("dp_cp"), tp.Zigzag(mesh["cp"])
    model, optimizer = made(flat)
    found = steps(model, optimizer, 2, lambda t: s.shard(t.chunk(2)[mesh.get_local_rank("dp")]), s, flat.get_group())
    whole = StateDictOptions(full_state_dict=True)
    kept = io.BytesIO()
    torch.save(get_state_dict(model, optimizer, options=whole), kept)
    saved = [kept.getvalue()]
    dist.broadcast_object_list(saved, 0)
    if rank < 2:  # the same training goes on with two ranks, which share every sequence
        fewer = DeviceMesh.from_group(GROUPS[2], "cpu")
        s = tp.Zigzag(GROUPS[2])
        model, optimizer = made(fewer)
        weights, states = torch.load(io.BytesIO(saved[0]), weights_only=False)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=whole)
        found = torch.cat([found, steps(model, optimizer, 2, s.shard, s, GROUPS[2])])
        close(found, expected, 1e-12, "losses")
    close(found[:2], expected[:2], 1e-12, "losses of four ranks")


@partial(case, spawn="models")
def a_model_of_transformers_trains_as_on_one_device(rank):
    try:
        import transformers
    except ImportError:
        return
    from tilewise.compat.transformers import install

    install()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MistralConfig(**sizes, vocab_size=40, num_hidden_layers=2, sliding_window=9, pad_token_id=0)
    config._attn_implementation = "tilewise"
    model = transformers.MistralForCausalLM(config).double().train()
    tokens = torch.randint(1, 40, (B, N), generator=generator())
    labels = torch.cat([tokens[:, 1:], torch.full((B, 1), -100)], 1)

    def loss_of(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    loss = loss_of(model(tokens, use_cache=False).logits, labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for plan, s, checkpoints in (("ring", tp.Zigzag(everyone()), False), ("ulysses", tp.Zigzag(everyone()), True)):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        own, own_labels = s.shard((tokens, labels))
        with tp.using(s, plan):
            mine = loss_of(model(own, position_ids=s.positions(N)[None], use_cache=False).logits, own_labels)
        found = torch.autograd.grad(mine, list(model.parameters()))  # outside: checkpoints run again here
        total = mine.detach().clone()
        dist.all_reduce(total)
        close(total, loss, 1e-12, "loss")
        for share, whole in zip(found, expected, strict=True):
            dist.all_reduce(share)
            close(share, whole, 1e-9, "gradient of a weight")


def main(rank, spawn, folder):
    ranks = SPAWNS[spawn]
    if hasattr(os, "sched_setaffinity"):  # messages are faster between neighbours on a core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank * len(cores) // ranks]})
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=ANSWER)
    if ranks == RANKS:
        MESH.append(init_device_mesh("cpu", (2, 2)))
        GROUPS.update({size: dist.new_group(list(range(size))) for size in (2, 3)})
    results = {}
    for name, run in CASES[spawn].items():
        wrong = ""
        try:
            run(rank)
        except (Exception, pytest.fail.Exception):
            wrong = traceback.format_exc()
        results[name] = wrong
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def fork(spawn, folder):
    """Run every rank of a spawn, and say whether one failed."""
    if spawn != "six":
        torch.compile(torch.sin, backend="aot_eager")(torch.zeros(1))  # which imports the compiler, once for all
    return forked.run(SPAWNS[spawn], lambda rank: main(rank, spawn, folder))


if __name__ == "__main__":
    from tests.parallel import agreement, contents, functions, ranks  # these add their cases to the last one's

    assert agreement
    assert contents
    assert functions
    sys.exit(ranks.fork(sys.argv[1], sys.argv[2]))
