"""Pieces, calls and sums of parts, in one process: every entry is computed once, and errors do not grow."""

import json
from itertools import pairwise

import pytest
import torch

import tilewise as tw
from tilewise.attention import reference
from tilewise.parallel import fixed, plans
from tilewise.parallel.costs import Cluster, Cost, Sizes, cost, current, fit
from tilewise.parallel.pieces import join, length
from tilewise.parallel.plans import choose
from tilewise.parallel.reach import reach_of
from tilewise.parallel.shardings import Balanced, deal
from tilewise.parallel.shards import Given, Shards, backward_parts, forward_parts


def random_mask(draw, N):
    lo, hi = draw(N), draw(N)
    ids = torch.randint(0, 5, (1, N), generator=draw.generator)
    ids = ids.sort(1)[0] if draw(2) else ids
    table = torch.rand(1, N, N, generator=draw.generator) > 0.8
    return (
        tw.Mask.of(lambda b, h, i, j: (j <= i + hi) & (i - j < lo)),
        tw.Causal() & (lambda b, h, i, j: ids[b, i] == ids[b, j]),
        tw.Mask.of(lambda b, h, i, j: table[b, i, j]),
        tw.Window(lo, 0) | (lambda b, h, i, j: j < hi),
        tw.Mask.of(lambda b, h, i, j, n: (i + j) % 5 < n, 2),
        tw.Window(lo, hi), tw.Causal(), tw.Causal() & tw.Window(lo, 0), tw.Window(None, hi), tw.Documents(ids, ids),
        tw.Causal() & tw.Documents(ids, ids), tw.Prefix(torch.tensor([lo])),
        tw.Causal() & tw.Padding(torch.tensor([hi])),
        tw.Spans(*(torch.randint(0, N + 1, (1, N), generator=draw.generator).sort(1)[0].int() for _ in range(2))),
    )[draw(14)]  # fmt: skip


class Draw:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, n):
        return int(torch.randint(0, n, (), generator=self.generator))


@pytest.mark.parametrize("seed", range(90))
def test_calls_cover_what_a_mask_shows_once_and_nothing_else(seed):
    draw, N = Draw(seed), 48
    mask = random_mask(draw, N)
    cuts = sorted({0, N, *(draw(N) for _ in range(6))})
    runs = list(pairwise(cuts))
    order = torch.randperm(len(runs), generator=draw.generator).tolist()
    pieces = tuple(join(runs[x] for x in sorted(order[r::2])) for r in range(2))
    options = {"dropout": 0.5} if draw(2) else {}
    s = Shards(pieces, 0, reach_of(mask, N), mask, (), options)
    for sources in (range(2), (None,)):
        seen = counted(s, sources, N)
        assert torch.equal(seen, mask.dense(N, N).reshape(-1, N, N)[0].int().expand(N, N)), mask


def counted(s, sources, N):
    """How often calls with the keys of some ranks, or at once with all that rows see, show each entry of P."""
    seen = torch.zeros(N, N, dtype=torch.int)
    for to in range(2):
        rows = torch.cat([torch.arange(*p) for p in s.pieces[to]])
        for source in sources:
            parts = s.pair(to, source)
            columns = torch.cat([torch.arange(*p) for p in parts.keys]) if parts.keys else rows[:0]
            for v in parts.blocks:
                given = s.arguments(v)
                shown, place = given["mask"], given["origin"] or tw.Origin()
                M, n = v.rows.stop - v.rows.start, v.keys.stop - v.keys.start
                placed = [part.placed(place, M, n) for part in shown.parts]
                dense = torch.ones(M, n, dtype=torch.bool)
                for part in placed:
                    dense = dense & part.dense(M, n)
                box = dense.reshape(M, n).int()
                seen[rows[v.rows][:, None], columns[v.keys][None, :]] += box
            if source is None:
                assert all(a.rows.stop <= b.rows.start for a, b in pairwise(parts.blocks)), "a row is in two calls"
    return seen


def test_rows_that_see_nothing_between_others_ask_for_no_keys():
    """The keys of batch entries begin and end apart, so that their hull covers rows which none of them has."""
    lo, hi = torch.full((2, 48), 48, dtype=torch.int32), torch.full((2, 48), 48, dtype=torch.int32)
    lo[0, :16], hi[0, :16] = 0, 40
    lo[1, :32], hi[1, :32], lo[1, 32:] = 0, 0, 10
    mask, pieces = tw.Spans(lo, hi), (((0, 16), (32, 48)), ((16, 32),))
    s = Shards(pieces, 0, reach_of(mask, 48), mask, (), {}, batch=2)
    assert s.reach.first(20) < s.reach.end(20)
    assert [s.pair(1, source) for source in range(2)] == [((), ())] * 2
    assert [len(s.pair(0, source).blocks) for source in range(2)] == [1, 1]


def rms(found, true):
    return float((found.double() - true).square().mean().sqrt() / true.square().mean().sqrt())


def test_errors_of_bf16_do_not_grow_with_the_number_of_parts():
    """Relative RMS errors of o, dq, dk and dv at 64 parts are at most 1.05 of one call's."""
    N, H, D = 512, 2, 32
    g = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, N, H, D, generator=g).bfloat16() for _ in range(4))
    exact = [t.double() for t in (q, k, v, do)]
    o_t, _ = reference.attention(*exact[:3], mask=tw.Causal())
    true = (o_t, *reference.gradients(*exact, mask=tw.Causal())[:3])
    errors = {}
    for count in (1, 64):
        pieces = tuple(((r * N // count, (r + 1) * N // count),) for r in range(count))
        s = Shards(pieces, 0, reach_of(tw.Causal(), N), tw.Causal(), (), {})
        o, lse = torch.zeros(1, N, H, D), torch.full((1, H, N), -torch.inf)
        for r, ((a, b),) in enumerate(pieces):
            for source in range(count):
                parts = s.pair(r, source)
                keys = tuple(
                    torch.cat([t[:, x:y] for x, y in parts.keys], 1) if parts.keys else t[:, :0] for t in (k, v)
                )
                forward_parts(s, (o[:, a:b], lse[:, :, a:b]), q[:, a:b], keys, parts)
        rounded = o.bfloat16()
        sums = [torch.zeros(1, N, H, D) for _ in range(3)]
        for r, ((a, b),) in enumerate(pieces):
            own = Given(do[:, a:b], rounded[:, a:b], lse[:, :, a:b], None)
            for source in range(count):
                parts = s.pair(r, source)
                for x, y in parts.keys:
                    found = backward_parts(s, own, q[:, a:b], (k[:, x:y], v[:, x:y]), parts, sums[0][:, a:b], {})[1]
                    for total, part in zip(sums[1:], found, strict=True):
                        total[:, x:y] += part
        errors[count] = [rms(t.bfloat16(), x) for t, x in zip((o, *sums), true, strict=True)]
    for one, many in zip(errors[1], errors[64], strict=True):
        assert many <= 1.05 * one, errors


@pytest.mark.parametrize(("N", "ranks"), [(1 << 14, 8), (1 << 15, 16), (1 << 18, 8)])
def test_the_solver_balances_packed_documents(N, ranks):
    g = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(N // 128, generator=g) * 1.5 + 5.0).long().clamp(16, N // 4)
    ends = lengths.cumsum(0)
    ids = torch.bucketize(torch.arange(N), ends, right=True)[None]
    mask = tw.Causal() & tw.Documents(ids, ids)
    counts, chunk = reach_of(mask, N).counts(), 128
    pieces = deal([float(part.sum()) for part in counts.split(chunk)], N, ranks, chunk)
    assert sorted(i for own in pieces for a, b in own for i in range(a, b)) == list(range(N))
    assert {length(own) for own in pieces} == {N // ranks}
    work = [float(sum(counts[a:b].sum() for a, b in own)) for own in pieces]
    assert max(work) <= 1.01 * sum(work) / ranks


def test_the_model_prefers_ulysses_in_a_node_and_the_ring_for_narrow_windows():
    node = Sizes(1 << 18, 8, 32, 8, 128)
    assert cost("ulysses", 1, node).seconds < min(cost(plan, 1, node).seconds for plan in ("ring", "gather"))
    wide = Sizes(1 << 20, 64, 32, 8, 128, visible=0.5)
    grid = cost("ring", 8, wide)
    assert grid.seconds < cost("ring", 1, wide).seconds
    narrow = wide._replace(visible=0.01, fetched=0.01)
    assert cost("ring", 1, narrow).received < 0.05 * cost("gather", 1, narrow).received


def test_the_model_prefers_halo_for_windows_and_not_where_all_keys_travel():
    visible, balance, most, calls = 0.117, 1.07, 1 / 6, 1
    window = Sizes(1 << 16, 4, 32, 8, 128, 2, visible, 1.5 * visible, most, calls, balance)
    others = [cost(plan, 1, window) for plan in ("ulysses", "gather", "ring")]
    assert cost("halo", 1, window).seconds < min(one.seconds for one in others)
    assert cost("halo", 1, window).received == most * cost("gather", 1, window).received
    causal = Sizes(1 << 16, 4, 32, 8, 128)
    assert cost("halo", 1, causal).seconds == cost("gather", 1, causal).seconds > cost("ring", 1, causal).seconds


def test_ulysses_has_spans_of_fixed_documents():
    """They are as the documents are; what is not fixed, or no interval a row, stays as it is."""
    N, q = 96, torch.zeros(2, 96, 2, 8)
    sorted_ids, mixed = ((torch.arange(N) // 30)[None].repeat(2, 1) % m for m in (9, 2))
    sorted_ids[1, 40:] += 1
    for ids, fits in ((sorted_ids, True), (mixed, False)):
        mask = tw.Causal() & tw.Documents(ids, ids)
        w = plans.Work(None, N, (), fixed(mask), (), None, False, {})  # type: ignore[arg-type]
        found = plans.in_spans(w, q, 4)
        assert isinstance(found, tw.Spans) == fits
        assert torch.equal(found.dense(N, N).expand(2, 1, N, N), mask.dense(N, N).expand(2, 1, N, N))
        assert (found is w.mask) != fits
        assert plans.in_spans(w._replace(mask=mask), q, 4) is mask
        band = w._replace(mask=tw.Causal())
        assert plans.in_spans(band, q, 4) is band.mask


def test_the_fastest_plan_under_the_limit_of_memory_is_chosen():
    costs = {"fast": Cost(1.0, 0.0, 0.0, 8e9), "small": Cost(2.0, 0.0, 0.0, 1e9), "slow": Cost(3.0, 0.0, 0.0, 2e9)}
    assert choose(costs, 16e9) == "fast"
    assert choose(costs, 4e9) == "small"
    assert choose(costs, 1e6) == "small"
    assert choose({}, 1e9) is None


def measured(c):
    """Rows as studies/bench/parallel.py writes them, on a cluster that is just like the model."""
    cases = [("causal", tokens, heads, plan) for tokens in (1 << 15, 1 << 16, 1 << 18) for heads in ((32, 8), (64, 8))
            for plan in ("ulysses", "gather", "ring")]  # fmt: skip
    return [
        {"mask": mask, "tokens": N, "gpus": 8, "heads": heads, "plan": plan,
         "milliseconds": 1e3 * cost(plan, 1, Sizes(N, 8, *heads, 128), c).seconds,
         "milliseconds_of_share": 1e3 * cost("ulysses", 1, Sizes(N, 1, heads[0] // 8, heads[1] // 8, 128), c).seconds}
        for mask, N, heads, plan in cases
    ]  # fmt: skip


def test_the_model_is_fitted_to_what_was_measured(tmp_path, monkeypatch):
    true = Cluster(forward=400e12, backward=350e12, link=120e9)
    rows = measured(true)
    found = fit([*rows, {"mask": "window", "gpus": 8, "plan": "ring"}])
    for row in rows:
        seconds = cost(row["plan"], 1, Sizes(row["tokens"], 8, *row["heads"], 128), found).seconds
        assert seconds == pytest.approx(row["milliseconds"] / 1e3, rel=0.02)
    assert found.link == pytest.approx(true.link, rel=0.1)
    with pytest.raises(ValueError, match="got none"):
        fit([])
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(found._asdict()))
    monkeypatch.setenv("TILEWISE_CLUSTER", str(file))
    assert current() == found
    for text in ("{", '{"speed": 1}', "[1]"):
        other = tmp_path / f"{len(text)}.json"
        other.write_text(text)
        monkeypatch.setenv("TILEWISE_CLUSTER", str(other))
        with pytest.raises(ValueError, match="must name a JSON file"):
            current()


def test_halo_makes_one_call_of_a_window_and_of_documents():
    """Keys lie in one piece, those before a rank's own; dealt-out chunks of documents are one call of Spans."""
    N, ranks = 512, 4
    window, ids = tw.Causal() & tw.Window(47, 0), (torch.arange(N) // 90)[None]
    documents = tw.Causal() & tw.Documents(ids, ids)
    runs = tuple(((r * 128, r * 128 + 128),) for r in range(ranks))
    dealt = Balanced(None, documents, N, 16).cut(N, ranks)
    for mask, pieces in ((window, runs), (documents, runs), (documents, dealt)):
        s = Shards(pieces, 0, reach_of(mask, N), mask, (), {})
        for r in range(ranks):
            assert len(s.pair(r, None).blocks) == 1
    s = Shards(runs, 0, reach_of(window, N), window, (), {})
    assert [s.pair(r, None).keys for r in range(ranks)] == [((max(0, a - 47), b),) for ((a, b),) in runs]
    dropped = Shards(runs, 0, reach_of(window, N), window, (), {"dropout": 0.5})
    assert dropped.pair(2, None).keys == ((192, 384),)  # a multiple of what kernels draw together
