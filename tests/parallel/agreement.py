"""Cases of ranks that hold few rows, or that do not agree: each is right on every rank, or an error on every rank."""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp
from tilewise.attention import reference
from tilewise.parallel import exchange
from tilewise.parallel.ulysses import Swap

from .contents import pair
from .ranks import MESH, D, N, case, close, everyone, generator, tensors


def few_rows(s, kind, heads=8):
    """Return the whole's q, k, v and do, and the options of the whole and of the rank, with one row or so a rank."""
    n, g = s.length, generator()
    x = [torch.randn(2, n, heads, D, generator=g).double() for _ in range(4)]
    bias, seen = torch.randn(heads, n, n, generator=g).double(), torch.eye(n, dtype=torch.bool)
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
    # of rows that see one key, dq and dk are 0 but for rounding of 1e-15, which `close` compares with 1e-3
    for t, true in zip(mine, reference.gradients(*x, **of_whole), strict=False):
        close(t.grad, s.shard(true), 1e-11, f"{plan} {kind} gradient")


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
            for plan in ("ring", "gather", "halo", None):
                check(s, plan, kind)


@case
def one_row_of_a_bias_or_a_dense_mask_is_no_broadcast_for_a_grid(rank):
    for kind in ("bias", "dense"):
        refused(tp.Contiguous(MESH[0], 4), tp.Grid(2, 2), kind, f"{kind.capitalize()} has one row")
        refused(tp.Contiguous(MESH[0], 9), tp.Grid(2, 2), kind, f"{kind.capitalize()} has rows")


def operands(s, dtype=torch.float64):
    return [t.to(dtype) for t in s.shard(tuple(tensors(4, 2)[:3]))]


def differ(words, call):
    """Assert that a call which ranks do not agree on raises on this rank, and that the next one runs on all."""
    with pytest.raises(ValueError, match=f"{words} must be alike on every rank, got .+; pass the same to all"):
        call()
    s = tp.Zigzag(everyone())
    close(
        tp.attention(*operands(s), sharding=s, plan="ring", mask=tw.Causal()),
        s.shard(reference.attention(*tensors(4, 2)[:3], mask=tw.Causal())[0]), 1e-12, "the next call",
    )  # fmt: skip


PLANS = ("ring", "gather", "halo", "ulysses")


@pair
def a_call_that_one_rank_knows_and_another_does_not(rank):
    s = tp.Contiguous(everyone())
    for plan in PLANS:
        call = partial(tp.attention, *operands(s), sharding=s, plan=plan)
        call(mask=tw.Causal())
        differ("mask and score", partial(call, mask=(tw.Causal(), tw.Window(3, 0))[rank]))  # rank 0 repeats itself
        differ("the plan", partial(call, mask=tw.Causal(), plan=(plan, "ring" if plan != "ring" else "gather")[rank]))
        x = operands(s)
        differ("q, k and v", partial(tp.attention, *[t[: 2 - rank] for t in x], sharding=s, plan=plan))


@pair
def ids_that_differ(rank):
    s = tp.Contiguous(everyone())
    ids = torch.arange(N).div(8 << rank, rounding_mode="floor")[None].repeat(2, 1)
    for plan in PLANS:  # on a CPU all plans look; on a GPU those that need to, and all with TILEWISE_CHECK=1
        for mask in (tw.Documents(ids, ids), tp.fixed(tw.Documents(ids, ids)), tw.Prefix(ids[:, 9])):
            differ("the numbers of the mask", partial(tp.attention, *operands(s), sharding=s, plan=plan, mask=mask))
    seed = torch.tensor(rank)
    differ("the options", partial(tp.attention, *operands(s), sharding=s, plan="ring", dropout=0.5, seed=seed))


@pair
def gradients_that_one_rank_wants(rank):
    s, alike = tp.Contiguous(everyone()), torch.zeros(4, 1, N).double()
    for plan in PLANS:
        for n in range(3):
            x = [t.requires_grad_(rank == 1 and n == m) for m, t in enumerate(operands(s))]
            differ("what requires a gradient", partial(tp.attention, *x, sharding=s, plan=plan))
        given = {"sink": torch.zeros(4).double(), "score": (tw.Alibi(torch.ones(4)), tw.Bias(alike.clone()))}
        for learned in (given["sink"], given["score"][1].bias):
            learned.requires_grad_(rank == 1)
            differ("what requires a gradient", partial(tp.attention, *operands(s), sharding=s, plan=plan, **given))
            learned.requires_grad_(False)
        x = [t.requires_grad_() for t in operands(s)]
        with torch.set_grad_enabled(rank == 1):
            differ("what requires a gradient", partial(tp.attention, *x, sharding=s, plan=plan))


@pair
def autocast_and_lse_on_one_rank(rank):
    s = tp.Contiguous(everyone())
    for plan in PLANS:
        call = partial(tp.attention, *operands(s, torch.float32), sharding=s, plan=plan)
        with torch.autocast("cpu", enabled=rank == 1):
            differ("q, k and v", call)
        with torch.autocast("cpu"):
            assert call().dtype == torch.bfloat16
        differ("the options", partial(call, return_lse=rank == 1))


@pair
def an_error_of_one_rank_is_one_of_all(rank):
    s, q = tp.Contiguous(everyone()), operands(tp.Contiguous(everyone()))[0]
    for plan in PLANS:
        wrong = [{"scale": "large"}, {"mask": tw.Padding(torch.tensor([N, -1]))}, {"score": tw.Bias(torch.zeros(7, 7))}]
        for options, kind in zip(wrong, (TypeError, ValueError, ValueError), strict=True):
            with pytest.raises(kind if rank else ValueError) as caught:
                tp.attention(q, q, q, sharding=s, plan=plan, **(options if rank else {}))
            if not rank:
                words = rf"a call must be possible on every rank, got {kind.__name__}: .+ on rank 1; pass what fits"
                assert re.match(words, str(caught.value)), caught.value
        with pytest.raises(tw.Unsupported, match="no back end takes this call"):
            tp.attention(q, q, q, sharding=s, plan=plan, backend="hopper", mask=tw.Window(0, 0))
    differ("a call", lambda: tp.attention(q, q, q, sharding=s) if rank else s.unshard(q))
    differ("x", lambda: s.unshard(q.float() if rank else q))
    differ("x", lambda: s.unshard(q[:, :, : 1 + rank]))
    with pytest.raises(ValueError, match=r"x must have the 30 rows" if rank else "got ValueError: x must have the 30"):
        tp.Contiguous(everyone(), 60).unshard(q[:, : 30 - rank])
    differ("the sharding", lambda: (tp.Zigzag(everyone()) if rank else s).unshard(q))


@pair
def compiled_calls_that_differ_when_they_run(rank):
    s, graphs = tp.Contiguous(everyone()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for plan in ("ring", "ulysses"):
        x, ids = operands(s), torch.arange(N).div(8, rounding_mode="floor")[None].repeat(2, 1)

        def call(q, k, v, ids, causal, plan=plan):
            mask = tw.Documents(ids, ids) & (tw.Causal() if causal else tw.Full())
            return tp.attention(q, k, v, sharding=s, plan=plan, mask=mask)

        compiled = torch.compile(call, backend=backend, fullgraph=True)
        assert torch.equal(compiled(*x, ids, True), call(*x, ids, True))
        made = len(graphs)
        differ("the numbers of the mask", partial(compiled, *x, ids * rank, True))  # in one graph
        assert len(graphs) == made
        differ("mask and score", partial(compiled, *x, ids, rank == 0))  # rank 0 has a graph, rank 1 makes one
        assert len(graphs) == made + rank
    whole = torch.compile(s.unshard, backend=backend, fullgraph=True)
    assert torch.equal(whole(x[0]), tensors(4, 2)[0])
    differ("x", lambda: whole(x[0].float() if rank else x[0]))


@pair
def ranks_without_rows_and_with_one(rank):
    for length in (0, 1, 3):
        s = tp.Contiguous(everyone(), length)
        assert s.shard(torch.zeros(2, length, 3)).shape == (2, (rank + 1) * length // 2 - rank * length // 2, 3)
        for plan in (*PLANS, None):
            check(s, plan, "none")
        rows = s.shard(torch.arange(2.0 * length).view(2, length)).requires_grad_()
        whole = s.unshard(rows)
        assert torch.equal(whole, torch.arange(2.0 * length).view(2, length))
        whole.sum().backward()
        assert torch.equal(rows.grad, torch.full_like(rows, 2.0))
        assert tp.explain(*s.shard([torch.zeros(1, length, 4, D)] * 3), sharding=s).plan is not None


@pair
def masks_that_do_not_fit_the_whole(rank):
    s = tp.Contiguous(everyone())
    q = operands(s)[0][:1]
    ids, ends = torch.zeros(2, N, dtype=torch.int32), torch.arange(N, 0, -1)[None]
    wrong = [
        (tw.Documents(ids, ids), r"Documents: q_ids must have the whole's shape \(1, 64\), got \(2, 64\)"),
        (tw.Documents(ids[:1, :32], ids[:1, :32]), "Documents: q_ids must have the whole's shape"),
        (tw.Padding(torch.tensor([99])), "Padding: lengths must lie between 0 and"),
        (tw.Padding(torch.tensor([9]), torch.tensor([-1])), "Padding: starts must lie between 0 and"),
        (tw.Padding(torch.tensor([9, 9])), r"Padding: lengths must have the whole's shape \(1,\)"),
        (tw.Prefix(torch.tensor([99])), "Prefix: lengths must lie between 0 and"),
        (tw.Spans(ends, ends), "Spans: lo must never decrease"),
        (tw.Dense(torch.ones(2, 1, 32, N, dtype=torch.bool)), r"the rank's 32 rows and the whole's 64 keys, got \(2"),
    ]
    for plan in PLANS:
        for mask, words in wrong:
            with pytest.raises(ValueError, match=words):
                tp.attention(q, q, q, sharding=s, plan=plan, mask=mask)
    with pytest.raises(ValueError, match=r"Alibi: slopes must have the whole's shape \(1, 4\), got \(2, 4\)"):
        tp.attention(q, q, q, sharding=s, plan="ring", score=tw.Alibi(torch.ones(2, 4)))


def sent_by(call):
    """Return the names of torch.distributed's functions that a call runs, in order."""
    names, places = [], [(dist, name) for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv")]
    places += [(exchange, name) for name in ("ALL_GATHER", "REDUCE_SCATTER")]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            run = getattr(module, name)
            patch.setattr(module, name, lambda *x, run=run, name=name, **y: names.append(name) or run(*x, **y))
        call()
    return names


@pair
def every_call_begins_with_one_exchange(rank):
    s = tp.Zigzag(everyone())
    q = operands(s)[0].requires_grad_()
    calls = [partial(tp.attention, q, q, q, sharding=s, plan=plan, dropout=0.5) for plan in PLANS]
    for call in (*calls, partial(s.unshard, q)):
        for _ in range(2):
            assert [name == "all_reduce" for name in sent_by(call)][:3] in ([True, False], [True, False, False])
            assert "all_reduce" not in sent_by(partial(call().sum().backward))


@dataclass(frozen=True, eq=False)
class First(tw.Mask):
    """A mask that tilewise.parallel does not know."""

    count: int
    interval = False
    varlen = False

    def keep(self, i, j, shift):
        return (j < self.count) & (i >= 0)


@pair
def a_mask_that_cannot_be_cut_is_refused_where_it_would_have_to_be(rank):
    s = tp.Contiguous(everyone())
    q = operands(s)[0]
    for plan in ("ring", "gather", "halo"):
        with pytest.raises(tw.Unsupported, match="it knows no way to cut First to some rows and keys"):
            tp.attention(q, q, q, sharding=s, plan=plan, mask=First(3))


@pair
def second_derivatives_are_right_or_refused(rank):
    s = tp.Contiguous(everyone())
    for plan in PLANS:
        q = operands(s)[0].requires_grad_()
        o = tp.attention(q, q, q, sharding=s, plan=plan, mask=tw.Causal())
        (grad,) = torch.autograd.grad(o.sum() + q.pow(3).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="tilewise has no double backward"):
            torch.autograd.grad(grad.sum(), q)
    x = operands(s)[0].requires_grad_()
    (grad,) = torch.autograd.grad(s.unshard(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    close(second, 12 * x, 1e-12, "the second derivative of unshard")  # both ranks' copies count
    y = operands(s)[0].requires_grad_()
    (heads,) = Swap.apply(s.axes[0], s.pieces(N), True, y)
    (grad,) = torch.autograd.grad(heads.pow(3).sum(), y, create_graph=True)
    close(torch.autograd.grad(grad.sum(), y)[0], 6 * y, 1e-12, "the second derivative of a swap")
