"""merge(): partial results over disjoint keys."""

import pytest
import torch

import tilewise as tw


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def halves(q, k, v, cut, **options):
    return [
        tw.attention(q, k[:, part], v[:, part], return_lse=True, **options)
        for part in (slice(0, cut), slice(cut, None))
    ]


@pytest.mark.parametrize("cut", [0, 1, 7, 12])
def test_merged_parts_are_the_whole(cut):
    q, k, v = draw(2, 5, 4, 8), draw(2, 12, 2, 8), draw(2, 12, 2, 6)
    o, lse = tw.merge(halves(q, k, v, cut))
    whole, whole_lse = tw.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_packed_parts_merge_too():
    q, k, v = draw(9, 2, 8), draw(12, 2, 8), draw(12, 2, 8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    first, second, both = (
        tw.Varlen(ends, torch.tensor(cu, dtype=torch.int32)) for cu in ([0, 2, 6], [0, 3, 6], [0, 5, 12])
    )
    order = torch.tensor([0, 1, 6, 7, 8, 2, 3, 4, 5, 9, 10, 11])  # the parts' keys, sequence by sequence
    parts = [
        tw.attention(q, k[:6], v[:6], layout=first, return_lse=True),
        tw.attention(q, k[6:], v[6:], layout=second, return_lse=True),
    ]
    o, lse = tw.merge(parts)
    whole, whole_lse = tw.attention(q, k[order], v[order], layout=both, return_lse=True)
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_the_sink_goes_to_one_part():
    q, k, v, sink = draw(1, 5, 2, 8), draw(1, 12, 2, 8), draw(1, 12, 2, 8), draw(2)
    parts = [
        tw.attention(q, k[:, :5], v[:, :5], sink=sink, return_lse=True),
        tw.attention(q, k[:, 5:], v[:, 5:], return_lse=True),
    ]
    torch.testing.assert_close(tw.merge(parts)[0], tw.attention(q, k, v, sink=sink))


def test_one_part_is_itself():
    o, lse = tw.attention(draw(1, 5, 2, 8), draw(1, 6, 2, 8), draw(1, 6, 2, 8), return_lse=True)
    merged, merged_lse = tw.merge([(o, lse)])
    torch.testing.assert_close(merged, o)
    torch.testing.assert_close(merged_lse, lse)


def test_order_does_not_matter():
    parts = [(draw(1, 3, 2, 4), draw(1, 2, 3)) for _ in range(3)]
    for a, b in zip(tw.merge(parts), tw.merge(parts[::-1]), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_the_derivatives():
    tensors = [t.requires_grad_() for _ in range(3) for t in (draw(1, 3, 2, 4), draw(1, 2, 3))]
    assert torch.autograd.gradcheck(lambda *t: tw.merge(list(zip(t[::2], t[1::2], strict=True))), tensors)


def test_gradients_pass_through_merge_as_through_the_whole():
    q, k, v = (draw(1, n, 2, 8).requires_grad_() for n in (5, 12, 12))
    do, dlse = draw(1, 5, 2, 8), draw(1, 2, 5)
    merged = torch.autograd.grad(tw.merge(halves(q, k, v, 7)), (q, k, v), (do, dlse))
    whole = torch.autograd.grad(tw.attention(q, k, v, return_lse=True), (q, k, v), (do, dlse))
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_a_part_that_saw_nothing_vanishes():
    o, lse = draw(1, 3, 2, 4), draw(1, 2, 3)
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    merged, merged_lse = tw.merge([(o, lse), nothing])
    torch.testing.assert_close(merged, o)
    torch.testing.assert_close(merged_lse, lse)


def test_rows_that_saw_nothing_anywhere_stay_empty_and_have_no_gradient():
    o = draw(1, 3, 2, 4).requires_grad_()
    lse = draw(1, 2, 3)
    lse[0, 0, 1] = -torch.inf
    lse.requires_grad_()
    merged, merged_lse = tw.merge([(o, lse), (o * 0, lse)])
    assert (merged[0, 1, 0] == 0).all()
    assert merged_lse[0, 0, 1].isneginf()
    grads = torch.autograd.grad((merged.sum(), merged_lse[merged_lse.isfinite()].sum()), (o, lse))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, 1, 0] == 0).all()
    assert grads[1][0, 0, 1] == 0


def test_large_logsumexps_do_not_overflow():
    o = draw(1, 3, 2, 4, dtype=torch.float32)
    lse = torch.full((1, 2, 3), 1e4)
    merged, merged_lse = tw.merge([(o, lse), (-o, lse)])
    assert (merged == 0).all()
    torch.testing.assert_close(merged_lse, lse + torch.log(torch.tensor(2.0)))


def test_the_type_of_o_is_kept_and_lse_is_wide():
    parts = [(draw(1, 3, 2, 4, dtype=torch.bfloat16), draw(1, 2, 3, dtype=torch.float32)) for _ in range(2)]
    o, lse = tw.merge(parts)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


O, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ([], ValueError, ["parts", "at least one", "got none"]),
        ([(O,)], TypeError, ["part 0", "pair", "return_lse=True"]),
        ([O], (TypeError, ValueError), ["part 0"]),
        ([(O, 1.0)], TypeError, ["part 0", "pair of tensors"]),
        ([(O, LSE), (O, LSE.mT)], ValueError, ["part 1", "(2, 3, 4, 8)", "(2, 3, 4)", "(B, H, M)"]),
        ([(O, LSE), (O[:1], LSE[:1])], ValueError, ["part 1", "part 0", "shape"]),
        ([(O, LSE), (O.half(), LSE)], ValueError, ["part 1", "part 0", "type"]),
    ],
)
def test_a_wrong_part_says_what_is_wrong(parts, error, words):
    with pytest.raises(error) as caught:
        tw.merge(parts)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_added_to_sums_in_place(dtype, packed, backend):
    if backend:
        pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(1)
    rows, of_lse = ((37, 3), (3, 37)) if packed else ((2, 37, 3), (2, 3, 37))
    parts = [
        (torch.randn(*rows, 24, generator=g).to(device, dtype), (4 * torch.randn(of_lse, generator=g)).to(device))
        for _ in range(3)
    ]
    for n, (_, lse) in enumerate(parts):
        lse[..., n::5] = -torch.inf
        lse[..., -1] = -torch.inf  # no part sees a key there
    o, lse = torch.zeros(*rows, 24, device=device), torch.full(of_lse, -torch.inf, device=device)
    assert tw.merge(parts[:1], into=(o, lse), backend=backend)[0] is o
    tw.merge(parts[1:], into=(o, lse), backend=backend)
    true, true_lse = tw.merge([(x.double(), x_lse.double()) for x, x_lse in parts])
    torch.testing.assert_close(o.double(), true, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-6, rtol=1e-6)
    at_once, same = tw.merge(parts, backend=backend)
    assert at_once.dtype == dtype
    torch.testing.assert_close(at_once.double(), true, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    torch.testing.assert_close(same, lse)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"backend": "cuda"}, "None or 'triton'"),
        ({"into": (torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 6))}, "into must have o"),
        ({"into": (torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2).mT)}, "last strides of 1"),
        ({"into": (torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 5)), "grad": True}, "where a gradient is asked for"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_sums_must_be(options, word):
    given = dict(options)
    o = torch.zeros(1, 5, 2, 8, requires_grad=given.pop("grad", False))
    with pytest.raises(ValueError, match=word):
        tw.merge([(o, torch.zeros(1, 2, 5))], **given)
