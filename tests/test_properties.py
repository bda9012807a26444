"""Random combinations of variants and shapes, against the reference by the one rule."""

from itertools import pairwise

import torch
from conformance import rule
from conformance.cases import (
    BROADCASTS,
    MASKS,
    SCORES,
    STRIDES,
    Case,
    Draw,
    alibi,
    bias,
    both,
    dense,
    documents_mixed,
    make,
    softcap,
    window,
)
from conformance.test_conformance import chosen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.program import Entries

lengths = st.integers(0, 40)
sides = st.none() | st.integers(0, 45)
masks = st.one_of(
    st.sampled_from([*MASKS.values(), documents_mixed]),
    st.builds(window, sides, sides),
    st.builds(dense, st.sampled_from(BROADCASTS)),
)
packed_masks = st.one_of(
    st.sampled_from([MASKS[name] for name in ("causal", "prefix", "padding")]), st.builds(window, sides, sides)
)
scores = st.one_of(
    st.sampled_from([*SCORES.values(), alibi("BH")]),
    st.builds(softcap, st.floats(0.5, 50.0)),
    st.builds(bias, st.sampled_from(BROADCASTS)),
)
packed_scores = st.one_of(st.just(alibi()), st.builds(softcap, st.floats(0.5, 50.0)))
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@st.composite
def cases(draw):
    """Any case that fits together."""
    packed = draw(st.booleans())
    H_k, group, dtype = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(dtypes)
    return Case(
        name=f"random {draw(st.integers(0, 10**6))}",
        B=draw(st.integers(0, 3)),
        M=draw(lengths),
        N=draw(lengths),
        H=H_k * group,
        H_k=H_k,
        D=draw(st.integers(1, 24)),
        D_v=draw(st.integers(1, 24)),
        dtype=dtype,
        mask=both(*draw(st.lists(packed_masks if packed else masks, max_size=3))),
        score=tuple(draw(st.lists(packed_scores if packed else scores, max_size=2))),
        sink=draw(st.sampled_from([None, dtype, torch.float32])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        scale=draw(st.none() | st.floats(0.0, 1.0)),
        lengths=tuple(draw(st.lists(st.tuples(lengths, lengths), max_size=4))) if packed else None,
        loss=draw(st.sampled_from(["o", "lse", "both"])),
        strides=draw(st.sampled_from([name for name in STRIDES if not name.startswith("one_") or not packed])),
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(case=cases())
def test_any_combination_is_as_accurate_as_torch(case):
    call = make(case, "cpu")
    true = rule.truth(case, call)
    allowed = rule.bounds(case, call, true)
    for backend in ("cpu", "cpu-tiled"):
        with chosen(backend) as name:
            got = rule.run(case, call, name)
        assert {name: t.dtype for name, t in got.items()} == rule.result_types(call)
        rule.assert_as_accurate_as_torch(got, true, allowed)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(M=lengths, N=lengths, parts=st.lists(masks, max_size=3))
def test_what_a_mask_keeps_in_any_tile_is_what_dense_says(M, N, parts):
    draw = Draw(Case("random tile", M=M, N=N), "cpu")
    mask = both(*parts)(draw)
    whole = mask.dense(M, N).expand(2, 2, M, N)
    i0, j0 = M // 3, N // 2
    at = Entries.of(2, 2, M, N)
    at = at._replace(i=at.i[i0:], j=at.j[:, j0:])
    kept = torch.ones(2, 2, M - i0, N - j0, dtype=torch.bool)
    for part in mask.parts:
        kept &= part.keep(at)
    assert torch.equal(kept, whole[:, :, i0:, j0:])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(cuts=st.lists(st.integers(0, 30), max_size=4), H_k=st.integers(1, 2), group=st.integers(1, 3))
def test_parts_over_any_cut_of_the_keys_merge_to_the_whole(cuts, H_k, group):
    torch.manual_seed(sum(cuts))
    q = torch.randn(2, 7, H_k * group, 8, dtype=torch.float64)
    k, v = torch.randn(2, 30, H_k, 8, dtype=torch.float64), torch.randn(2, 30, H_k, 5, dtype=torch.float64)
    ends = [0, *sorted(cuts), 30]
    parts = [tw.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in pairwise(ends)]
    for merged, whole in zip(tw.merge(parts), tw.attention(q, k, v, return_lse=True), strict=True):
        torch.testing.assert_close(merged, whole)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(case=cases())
def test_permuting_the_batch_permutes_the_result(case):
    assume(case.lengths is None)
    call = make(case, "cpu")
    order = torch.arange(case.B - 1, -1, -1)
    flipped = [t.index_select(0, order) for t in (call.q, call.k, call.v)]
    plain = tw.attention(call.q, call.k, call.v, scale=case.scale)
    # not bit by bit: on some CPUs a product adds up in another order where its operands begin at another address
    torch.testing.assert_close(tw.attention(*flipped, scale=case.scale), plain.index_select(0, order))
