"""origin=Origin of functions: parts of a call see the whole's b, h, i and j, and captured tensors stay whole."""

from itertools import pairwise, product

import pytest
import torch
from program import masks as users

import tilewise as tw
from tilewise.call.recipe import KINDS
from tilewise.program.bounds import Grid, tiles
from tilewise.program.shape import shape
from tilewise.values.masks import Full

B, N, H, H_K, D = 2, 40, 4, 2, 8
DRAW = torch.Generator().manual_seed(4)
DOC = torch.randint(0, 3, (B, N), generator=DRAW).sort(1)[0]
PAIRS = torch.rand(H, N, N, generator=DRAW) > 0.4
GATES = torch.randn(B, H, N, generator=DRAW)
TABLE = torch.randn(H, 2 * N, generator=DRAW)
TAU = torch.randn((), generator=DRAW)
NEAR = tw.Mask.of(lambda b, h, i, j, n: (j <= i) & (i - j < n + 4 * h), 9)
USERS = users.masks(N)
MASKS = {
    "causal": tw.Mask.of(lambda b, h, i, j: j <= i),
    "last": tw.Mask.of(lambda b, h, i, j: (j <= i) & (i - j < 7), align="last"),
    "documents": tw.Mask.of(lambda b, h, i, j: (DOC[b, i] == DOC[b, j]) & (j <= i)),
    "by head, with a number": NEAR,
    "pairs": tw.Mask.of(lambda b, h, i, j, seen: seen[h, i, j] | (i == j), PAIRS),
    "joined": tw.Window(5, 0) | (lambda b, h, i, j: j < 3 + b),
    "nothing read": tw.Mask.of(lambda b, h, i, j: True),
    "not": ~tw.Mask.of(lambda b, h, i, j: (i + j) % 3 == 1) & NEAR,
}
SCORES = {
    "relative": (lambda s, b, h, i, j, table: s + table[h, i - j + N], TABLE),
    "gates": (lambda s, b, h, i, j, gates: s + gates[b, h, i] - gates[b, h, j], GATES),
    "temperature": (lambda s, b, h, i, j, tau: s * tau.exp() + 0.1 * b, TAU),
    "from the end": (lambda s, b, h, i, j, table: s + table[h, j - i], TABLE),
}
CUTS = {
    "rows": ((0, 13, N), (0, N), (0, H), (0, B)),
    "keys": ((0, N), (0, 20, 24, N), (0, H), (0, B)),
    "heads": ((0, N), (0, N), (0, 2, 4), (0, B)),
    "batch": ((0, N), (0, N), (0, H), (0, 1, 2)),
    "all": ((0, 16, N), (0, 24, N), (0, 2, 4), (0, 1, 2)),
}


def operands(dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(B, N, heads, D, generator=draw, dtype=dtype) for heads in (H, H_K, H_K, H)]


def parts_of(cuts):
    """The origin of each part, and the slices of a tensor like q and of one like k."""
    for (b0, b1), (h0, h1), (i0, i1), (j0, j1) in product(*[list(pairwise(cuts[n])) for n in (3, 2, 0, 1)]):
        b, group = slice(b0, b1), H // H_K
        rows = b, slice(i0, i1), slice(h0, h1)
        yield tw.Origin(i0, j0, h0, H, b0), rows, (b, slice(j0, j1), slice(h0 // group, h1 // group))


def by_parts(cuts, x, do, **options):
    """o, lse, gradients of q, k and v, and that of what the score captures."""
    q, k, v = x
    o = torch.zeros(B, N, H, D, dtype=q.dtype)
    lse = torch.full((B, N, H), -torch.inf, dtype=q.dtype)
    for origin, rows, keys in parts_of(cuts):
        part = tw.attention(q[rows], k[keys], v[keys], return_lse=True, origin=origin, **options)
        o[rows], found = tw.merge([(o[rows], lse[rows].transpose(1, 2)), part])
        lse[rows] = found.transpose(1, 2)
    grads = [torch.zeros_like(t) for t in x]
    learned = []
    for origin, rows, keys in parts_of(cuts):
        given = [t.contiguous() for t in (do[rows], q[rows], k[keys], v[keys], o[rows], lse[rows].transpose(1, 2))]
        found = tw.attention_backward(*given, origin=origin, **options)
        for grad, part, at in zip(grads, found[:3], (rows, keys, keys), strict=True):
            grad[at] += part
        learned += found[3:]
    return o, lse.transpose(1, 2), *grads, sum(learned)


def check_parts(cuts, mask, score, table, **more):
    *x, do = operands()
    table = table.double().requires_grad_()
    leaves = [t.clone().requires_grad_() for t in x]
    options = {"mask": mask, "score": tw.Score.of(score, table), **more}
    o, lse = tw.attention(*leaves, return_lse=True, **options)
    true = o, lse, *torch.autograd.grad(o, [*leaves, table], do)
    with torch.no_grad():
        found = by_parts(cuts, x, do, **options)
    for mine, theirs in zip(found, true, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_parts_are_parts_of_the_whole(mask, cut):
    n = list(MASKS).index(mask) + list(CUTS).index(cut)
    score, table = list(SCORES.values())[n % len(SCORES)]
    check_parts(CUTS[cut], MASKS[mask], score, table)


@pytest.mark.parametrize("name", SCORES)
def test_scores_meet_our_masks_and_dropout(name):
    more = {"dropout": 0.3, "seed": 3} if name == "relative" else {}
    check_parts(((0, 16, N), (0, N), (0, H), (0, B)), Full(), *SCORES[name], **more)
    check_parts(CUTS["heads"], tw.Causal() & MASKS["documents"], *SCORES[name], **more)


def test_another_place_is_the_same_program():
    places = [tw.Origin(3, 5, 1, 4, 1), tw.Origin(0, 0, 0, 4, 0), tw.Origin(40, 7, 3, 4, 9)]
    moved = [NEAR.placed(place, 8, 8) for place in places]
    assert {one.name for one in moved} == {moved[0].name}
    assert [one.numbers for one in moved] == [(9, 3, 5, 1), (9, 0, 0, 0), (9, 40, 7, 3)]
    assert repr(moved[0]) == repr(NEAR)
    assert KINDS[moved[0].name].public_name() == NEAR.public_name()
    twice = moved[0].of_part(tw.Origin(head=2))
    assert torch.equal(twice.dense(8, 8, 1, 4), NEAR.placed(tw.Origin(3, 5, 3), 8, 8).dense(8, 8, 1, 4))


def test_what_reads_nothing_of_a_place_stays():
    double = tw.Score.of(lambda s, b, h, i, j: 2 * s)
    assert double.placed(places := tw.Origin(3, 5, 1, 4, 1), 8, 8) is double
    assert double.of_part(places) is double
    assert MASKS["causal"].of_part(places) is MASKS["causal"]
    assert tw.Causal().placed(places, 8, 8) == tw.Causal()


@pytest.mark.parametrize("align", ["first", "last"])
def test_packed_sequences_have_a_place_among_heads_and_others(align):
    """Their rows count from their own first, or last, as without a place."""
    cu = torch.tensor([0, 9, 30, 40], dtype=torch.int32)
    q, k, v = (t[0] for t in operands()[:3])
    table, lengths = torch.randn(H, 2 * N).double(), torch.tensor([5, 11, 4])
    mask = tw.Mask.of(lambda b, h, i, j: (j <= i) | (j < lengths[b]), align=align)
    score = tw.Score.of(lambda s, b, h, i, j: s + table[h, i - j], align=align)
    whole = tw.attention(q, k, v, layout=tw.Varlen(cu, cu), mask=mask, score=score)
    part = tw.attention(
        q[9:, 2:], k[9:, 1:], v[9:, 1:], layout=tw.Varlen(cu[1:] - 9, cu[1:] - 9), mask=mask, score=score,
        origin=tw.Origin(head=2, heads=4, batch=1),
    )  # fmt: skip
    assert torch.equal(part, whole[9:, 2:])


def test_captured_tensors_must_have_room_for_the_place():
    q = torch.zeros(1, 8, 2, 8)
    call = {"mask": NEAR, "score": tw.Score.of(SCORES["gates"][0], GATES)}
    assert tw.attention(q, q, q, origin=tw.Origin(3, 4, 2, 4, 1), **call).shape == q.shape
    for origin, least in (
        (tw.Origin(head=3, heads=8), "1 in dimension 0, which b indexes and 5 in dimension 1, which h indexes"),
        (tw.Origin(batch=2), "3 in dimension 0, which b indexes and 2 in dimension 1, which h indexes"),
    ):
        with pytest.raises(
            ValueError, match=rf"captured tensor 1 must have a size of at least {least}, got \(2, 4, 40"
        ):
            tw.attention(q, q, q, origin=origin, **call)
    with pytest.raises(ValueError, match=r"\|.*: captured tensor 1 must have a size of at least 3 in dimension 0"):
        tw.attention(q, q, q, mask=tw.Documents(DOC, DOC) | NEAR, origin=tw.Origin(batch=2))


def test_the_compiler_takes_a_place():
    x, score = operands()[:3], tw.Score.of(SCORES["relative"][0], TABLE)
    origin = tw.Origin(16, 3, 0, 4, 0)
    compiled = torch.compile(
        lambda q, k, v: tw.attention(q, k, v, mask=NEAR, score=score, origin=origin),
        backend="aot_eager",
        fullgraph=True,
    )
    given = [t[:, :20] for t in x]
    assert torch.equal(compiled(*given), tw.attention(*given, mask=NEAR, score=score, origin=origin))


def test_vmap_goes_on_at_a_place():
    q, k, v = (torch.randn(3, B, 12, H, D) for _ in range(3))
    origin = tw.Origin(2, 0, 0, H, 0)
    for mask, score in ((NEAR, tw.Score.of(SCORES["gates"][0], GATES)), (NEAR, ())):
        given = {"mask": mask, "score": score, "origin": origin}
        got = torch.vmap(lambda *x: tw.attention(*x, **given))(q, k, v)  # noqa: B023
        torch.testing.assert_close(got, torch.stack([tw.attention(*x, **given) for x in zip(q, k, v, strict=True)]))


@pytest.mark.parametrize("name", USERS)
def test_masks_of_users_at_a_place(name):
    """Their entries are the whole's, and their class, by which tiles are found, stays."""
    whole = tw.Mask.of(USERS[name])
    part = whole.placed(tw.Origin(5, 7, 1, users.H, 1), 20, 24)
    assert torch.equal(
        *torch.broadcast_tensors(part.dense(20, 24), whole.dense(N, N, 2, 2).expand(2, 2, N, N)[-1:, -1:, 5:25, 7:31])
    )
    assert shape(part.text).name == shape(whole.text).name
    possible, certain = tiles(part.program, part.given, part.numbers, Grid(1, 1, 20, 24, 4, 8))
    seen = part.dense(20, 24).expand(1, 1, 20, 24).unflatten(3, (3, 8)).unflatten(2, (5, 4))
    assert not (seen.any(5).any(3) & ~possible).any()
    assert not (certain & ~seen.all(5).all(3)).any()
