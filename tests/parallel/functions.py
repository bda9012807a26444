"""Cases of masks and scores that are functions: they see the whole's b, h, i and j, and their captures stay whole."""

from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
import tilewise.parallel as tp

from .ranks import GROUPS, MESH, RANKS, B, N, case, close, everyone, generator, ids, plans, tensors, uneven

four = partial(case, spawn="functions")
H = 6
"""The most heads of a call here."""


@lru_cache(None)
def captured():
    """What the functions capture: a document of each row, pairs by head, and tables that learn."""
    g = generator(11)
    return {
        "doc": ids(),
        "mixed": torch.randint(0, 3, (B, N), generator=g),
        "pairs": torch.rand(H, N, N, generator=g) > 0.3,
        "table": torch.randn(H, 2 * N, generator=g).double(),
        "gates": torch.randn(B, H, N, generator=g).double(),
        "tau": torch.rand(H, generator=g).double(),
    }


@lru_cache(None)
def masks():
    doc, mixed, pairs = (captured()[name] for name in ("doc", "mixed", "pairs"))
    return {
        "causal": tw.Mask.of(lambda b, h, i, j: j <= i),
        "window by head": tw.Causal() & tw.Mask.of(lambda b, h, i, j: i - j < 5 + 4 * h, align="last"),
        "documents": tw.Mask.of(lambda b, h, i, j: (doc[b, i] == doc[b, j]) & (j <= i)),
        "mixed": tw.Window(20, 9) & (lambda b, h, i, j: mixed[b, i] == mixed[b, j]),
        "pairs": tw.Mask.of(lambda b, h, i, j, seen: seen[h, i, j] | (i == j), pairs),
        "joined": tw.Window(6, 0) | (lambda b, h, i, j: j < 3 + b),
        "of our documents": ~tw.Documents(mixed, mixed) | tw.Causal(),
    }


@lru_cache(None)
def by_head():
    """Masks whose tensors have one list, or several intervals, for each of 4 heads."""
    g = generator(12)
    lists = torch.randint(-1, -(-N // 5), (B, 4, -(-N // 7), 6), generator=g)
    first = torch.randint(0, N, (1, 4, N, 2), generator=g)
    return {"blocks": tw.Blocks(lists, (7, 5)) & tw.Window(30, 9), "spans": tw.Spans(first, first + 9)}


def scores(learned):
    """Scores, and the tensor that each learns."""
    table, gates, tau = (learned[name] for name in ("table", "gates", "tau"))
    return {
        "relative": ((tw.Score.of(lambda s, b, h, i, j: s + table[h, i - j + N]),), table),
        "gates": ((tw.SoftCap(5.0), tw.Score.of(lambda s, b, h, i, j: s + gates[b, h, i] - gates[b, h, j])), gates),
        "temperature": ((tw.Score.of(lambda s, b, h, i, j: s * tau[h], align="last"),), tau),
    }


def call(attend, x, do, sink, mask, score, **options):
    """Return o, lse, and the gradients of q, k, v, the sink and of what the score learns."""
    leaves = [t.clone().requires_grad_() for t in (*x, sink)]
    learned = {name: captured()[name].clone().requires_grad_() for name in ("table", "gates", "tau")}
    some, table = scores(learned)[score]
    o, lse = attend(*leaves[:3], mask=mask, score=some, sink=leaves[3], return_lse=True, **options)
    return o, lse, *torch.autograd.grad((o, lse), [*leaves, table], (do, torch.ones_like(lse)))


@lru_cache(None)
def truth(mask, score, heads, length, dropout):
    q, k, v, do, _, sink = tensors(*heads, length)
    return call(tw.attention, (q, k, v), do, sink, (masks() | by_head())[mask], score, dropout=dropout, seed=5)


def check(plan, s, mask, score, heads=(4, 2), dropout=0.0):
    length = s.global_length or N
    q, k, v, do, _, sink = tensors(*heads, length)
    attend = partial(tp.attention, sharding=s, plan=plan)
    given, mask_of = {"dropout": dropout, "seed": 5}, masks() | by_head()
    *found, d_sink, d_table = call(attend, s.shard((q, k, v)), s.shard(do), sink, mask_of[mask], score, **given)
    *true, sink_t, table_t = truth(mask, score, heads, length, dropout)
    for group in s.axes:
        for share in (d_sink, d_table):
            dist.all_reduce(share, group=group)
    label = f"{plan} {s} {mask} {score}"
    for n, (mine, theirs) in enumerate(zip(found, true, strict=True)):
        close(mine, s.shard(theirs, 2 if n == 1 else 1), 1e-12, f"{label} result {n}")
    close(d_sink, sink_t, 1e-12, f"{label} sink")
    close(d_table, table_t, 1e-12, f"{label} {score}")


@four
def every_plan_and_sharding_with_functions(rank):
    names, kinds = list(masks()), list(scores(captured()))
    for n, (plan, s) in enumerate(plans()):
        for m in range(2 if plan in ("ring", "halo") else 1):
            check(plan, s, names[(n + 4 * m) % len(names)], kinds[(n + m) % len(kinds)])


@four
def every_plan_and_sharding_with_masks_by_head(rank):
    for n, (plan, s) in enumerate(plans()):
        check(plan, s, list(by_head())[n % 2], "relative")


@four
def dropout_beside_functions(rank):
    for n, (plan, s) in enumerate(plans(8)):
        if n % 4 == n // 4 % 4:
            check(plan, s, "window by head", "relative", dropout=0.25)


@four
def pieces_of_several_sizes_on_two_and_three_ranks(rank):
    checked = 0
    for size in (2, 3):
        for n, plan in enumerate(("ring", "gather", "halo", "ulysses") if rank < size else ()):
            for m, s in enumerate(uneven(GROUPS[size])):
                check(plan, s, list(masks())[(3 * n + m + size) % 7], ("relative", "gates")[m % 2], (6, 2))
                checked += 1
    assert checked == 12 * ((rank < 2) + (rank < 3))


@four
def balanced_by_a_function(rank):
    by_function = tp.Balanced(everyone(), masks()["documents"], N, 4)
    own = tp.Balanced(everyone(), tw.Causal() & tw.Documents(ids(), ids()), N, 4)
    causal = tp.Balanced(everyone(), lambda b, h, i, j: j <= i, N, 4)
    assert causal.work == tp.Balanced(everyone(), tw.Causal(), N, 4).work
    assert all(a >= b for a, b in zip(by_function.work, own.work, strict=True))
    assert sum(by_function.work) <= 1.5 * sum(own.work)
    check("ring", by_function, "documents", "relative")
    q = torch.zeros(B, N // RANKS, 4, 8)
    found = tp.explain(q, q, q, sharding=tp.Zigzag(everyone()), mask=masks()["causal"])
    assert sum(found.work) == N * (N + 1) / 2
    assert set(found.costs) == {"ulysses", "gather", "ring", "halo"}


@four
def functions_ask_for_the_keys_that_our_masks_do(rank):
    q, k, v, *_ = tensors(4, 2)
    lengths = torch.tensor([20, 45])
    pairs = (
        (tw.Causal() & tw.Window(11, 0), lambda b, h, i, j: (j <= i) & (i - j <= 11)),
        (tw.Prefix(lengths), lambda b, h, i, j: (j <= i) | (j < lengths[b])),
    )
    for s in (tp.Contiguous(everyone()), tp.Zigzag(everyone()), tp.Striped(everyone(), 4)):
        for own, function in pairs:
            sent = []
            for mask in (own, function):
                with tp.count_bytes() as each:
                    tp.attention(*s.shard((q, k, v)), sharding=s, plan="ring", mask=mask)
                sent.append(each)
            assert sent[0] == sent[1]
        with tp.count_bytes() as each:
            tp.attention(*s.shard((q, k, v)), sharding=s, plan="ring", mask=lambda b, h, i, j: i == j)
        assert not any(each.values())


@four
def a_function_compiles_in_one_graph_and_may_be_fixed(rank):
    if rank > 1:
        return
    s, plan = tp.Zigzag(GROUPS[2]), "ring"
    mask, table = tp.fixed(masks()["documents"]), captured()["table"].clone()
    score = tw.Score.of(lambda s, b, h, i, j, t: s + t[h, i - j + N], table)
    own = [t.requires_grad_() for t in (*s.shard(tuple(tensors(4, 2)[:3])), table)]

    def run(q, k, v, t):
        return tp.attention(q, k * 1.0, v, sharding=s, plan=plan, mask=mask, score=score.with_(t)) * 2.0

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = [f(*own) for f in (compiled, run)]
    grads = [torch.autograd.grad(o.sum(), own) for o in found]
    assert torch.equal(*found)
    assert all(map(torch.equal, *grads))


@four
def errors_name_the_function_on_every_rank(rank):
    s = tp.Zigzag(everyone())
    x, small, seen = s.shard(tuple(tensors(4, 2)[:3])), torch.zeros(3, N), torch.arange(N) > rank
    learned = torch.zeros(N).double().requires_grad_(rank == 1)
    for plan in ("ring", "gather", "halo", "ulysses"):
        run = partial(tp.attention, *x, sharding=s, plan=plan)
        with pytest.raises(ValueError, match=r"functions.py:\d+\): captured tensor 1 must have a size of at least 4"):
            run(score=lambda s, b, h, i, j: s + small[h, j])
        words = r"mask and score must be alike on every rank, got \[\('MaskOf [0-9a-f]{12}', 30\)\] and"
        with pytest.raises(ValueError, match=words):
            run(mask=tw.Mask.of(lambda b, h, i, j, n: j < n, 30 + rank))
        with pytest.raises(ValueError, match="mask and score must be alike on every rank"):
            run(mask=(lambda b, h, i, j: j < i) if rank else (lambda b, h, i, j: j <= i))
        with pytest.raises(ValueError, match="what requires a gradient must be alike on every rank"):
            run(score=lambda s, b, h, i, j: s + learned[j])
        with pytest.raises(ValueError, match="the numbers of the mask must be alike on every rank"):
            run(mask=lambda b, h, i, j: seen[j])
    with pytest.raises(TypeError, match="Balanced: mask must be a Mask, got 3"):
        tp.Balanced(everyone(), 3, N, 4)


@four
def dtensors_beside_functions(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = [t[:, :16] for t in tensors(8, 4)[:4]]
    mask = tw.Mask.of(lambda b, h, i, j: (j <= i + b) & (i - j < 3 + h))
    table = torch.randn(B, 8, 16, generator=generator()).double()
    score = tw.Score.of(lambda s, b, h, i, j, t: s + t[b, h, j], table)
    line = init_device_mesh("cpu", (RANKS,))
    places = [
        (line, [Shard(2)]),
        (line, [Shard(1)]),
        (MESH[0], [Shard(0), Shard(2)]),
        (MESH[0], [Replicate(), Shard(0)]),
    ]
    for dropout in (0.0, 0.3):
        given = {"mask": mask, "dropout": dropout, "seed": 3}
        whole = [t.clone().requires_grad_() for t in (*x[:3], table)]
        o = tw.attention(*whole[:3], score=score.with_(whole[3]), **given)
        true = torch.autograd.grad(o, whole, x[3])
        for mesh, at in places:
            own = [distribute_tensor(t.detach(), mesh, at).requires_grad_() for t in whole[:3]]
            learned = table.clone().requires_grad_()
            if dropout:  # a DTensor, too
                learned = distribute_tensor(table, mesh, [Replicate()] * mesh.ndim).requires_grad_()
            mine = tw.attention(*own, score=score.with_(learned), **given)
            do = distribute_tensor(x[3], mesh, [Replicate()] * mesh.ndim).redistribute(mesh, mine.placements)
            *grads, of_table = torch.autograd.grad(mine, [*own, learned], do)
            close(mine.full_tensor(), o, 1e-12, f"{at} o")
            for grad, exact in zip(grads, true[:3], strict=True):
                close(grad.full_tensor(), exact, 1e-12, f"{at} gradient")
            whole_grad = of_table.full_tensor() if dropout else of_table
            close(whole_grad, true[3], 1e-12, f"{at} gradient of the table")
    learned = distribute_tensor(table, MESH[0], [Replicate(), Replicate()])
    closed = tw.attention(*own, score=lambda s, b, h, i, j: s + learned[b, h, j], mask=mask)
    close(closed.full_tensor(), tw.attention(*x[:3], score=score, mask=mask), 1e-12, "a closure")
    cut = distribute_tensor(table, line, [Shard(1)])
    with pytest.raises(TypeError, match=r"whole on every rank, got a DTensor of \(Shard\(dim=1\),\); capture .full_"):
        tw.attention(*own, score=lambda s, b, h, i, j: s + cut[b, h, j])
    with pytest.raises(TypeError, match="captured tensor 1 must be a plain tensor in a parallel call, got a DTensor"):
        tp.attention(*x[:3], sharding=tp.Zigzag(everyone()), score=score.with_(learned))
