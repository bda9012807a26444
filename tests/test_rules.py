"""Masks and scores that follow from their rules, beside other features: against plain torch in fp64, on the CPU."""

import pytest
import torch

import tilewise as tw

B, H, H_k, D = 2, 4, 2, 8
PADDED = [(35, 52)] * B
PACKED = [(35, 52), (50, 21)]
"""Queries and keys of each sequence."""
M, N = 50, 52


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def whole(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def operands(lengths):
    rows, keys = (sum(each) for each in zip(*lengths, strict=True))
    shapes = (rows, H, D), (keys, H_k, D), (keys, H_k, D)
    return [draw(*shape).requires_grad_() for shape in shapes], draw(rows, H, D)


def plain(x, lengths, seen=None, bias=None):
    """o of packed rows; `seen` and `bias` say what the mask shows and what is added, of a sequence b, (H, m, n)."""
    outputs, row, key = [], 0, 0
    for b, (m, n) in enumerate(lengths):
        q, k, v = x[0][row : row + m], x[1][key : key + n], x[2][key : key + n]
        k, v = (t.repeat_interleave(H // H_k, 1) for t in (k, v))
        S = torch.einsum("mhd,nhd->hmn", q, k) * D**-0.5
        S = S if bias is None else S + bias(b, m, n)
        shown = torch.ones(H, m, n, dtype=torch.bool) if seen is None else seen(b, m, n).expand(H, m, n)
        P = torch.softmax(S.masked_fill(~shown, -1e300), -1) * shown.any(-1, keepdim=True)
        outputs.append(torch.einsum("hmn,nhd->mhd", P, v))
        row, key = row + m, key + n
    return torch.cat(outputs)


def ours(x, lengths, **options):
    if lengths is PADDED:
        return tw.attention(*[t.unflatten(0, (B, -1)) for t in x], **options).flatten(0, 1)
    cu = [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*lengths, strict=True)]
    return tw.attention(*x, layout=tw.Varlen(*cu), **options)


def check(lengths, seen=None, bias=None, learned=(), **options):
    x, do = operands(lengths)
    o, expected = ours(x, lengths, **options), plain(x, lengths, seen, bias)
    torch.testing.assert_close(o, expected)
    mine, theirs = (torch.autograd.grad(one, (*x, *learned), do) for one in (o, expected))
    torch.testing.assert_close(mine, theirs)
    return mine


def tables(lengths):
    return (35, 52) if lengths is PADDED else (M, N)


LAYOUTS = pytest.mark.parametrize("lengths", [PADDED, PACKED], ids=["padded", "packed"])


def spans(lengths, heads):
    m, _ = tables(lengths)
    lo = whole(60, B, heads, m, 3)
    return lo, lo + whole(20, B, heads, m, 3) - 4


def within(lo, hi):
    def seen(b, m, n):
        j = torch.arange(n)
        return ((lo[b, :, :m, :, None] <= j) & (j < hi[b, :, :m, :, None])).any(2)

    return seen


@LAYOUTS
@pytest.mark.parametrize("heads", [1, H])
def test_rows_see_a_union_of_spans_in_any_order(lengths, heads):
    lo, hi = spans(lengths, heads)
    check(lengths, within(lo, hi), mask=tw.Spans(lo, hi))
    other = tw.Spans(lo[..., :1], hi[..., :1]) | tw.Spans(lo[..., 1:].int(), hi[..., 1:])
    check(lengths, within(lo, hi), mask=other)


def listed(lists, rows, keys):
    def seen(b, m, n):
        found = torch.zeros(lists.shape[1], m, n, dtype=torch.bool)
        for h, r, one in [(h, r, one) for h, of_h in enumerate(lists[b % len(lists)].tolist())
                          for r, of_r in enumerate(of_h) for one in of_r]:  # fmt: skip
            if one >= 0:
                found[h, r * rows : (r + 1) * rows, one * keys : (one + 1) * keys] = True
        return found

    return seen


@LAYOUTS
@pytest.mark.parametrize(("batch", "heads", "size"), [(B, H, 16), (1, H, (8, 16)), (B, 1, (16, 5)), (1, 1, 100)])
def test_blocks_of_rows_see_the_blocks_of_keys_in_their_lists(lengths, batch, heads, size):
    rows, keys = size if isinstance(size, tuple) else (size, size)
    m, n = tables(lengths)
    lists = whole(-(-n // keys) + 2, batch, heads, -(-m // rows), 3) - 1
    ids = [torch.arange(count).expand(B, count) * 3 // count for count in (m, n)]
    check(lengths, listed(lists, rows, keys), mask=tw.Blocks(lists, size))

    def of_documents(b, m, n):
        return listed(lists, rows, keys)(b, m, n) & (ids[0][b, :m, None] == ids[1][b, :n])

    check(lengths, of_documents, mask=tw.Documents(*ids) & tw.Blocks(lists.int(), size))


def test_new_contents_of_lists_count_in_graphs_and_under_vmap():
    lists = torch.zeros(1, 1, 4, 2, dtype=torch.int64)
    mask = tw.Blocks(lists, 16)
    q = draw(2, 60, 2, D)
    compiled = torch.compile(lambda q, lists: tw.attention(q, q, q, mask=tw.Blocks(lists, 16)), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    for number in (0, 2):
        lists.fill_(number)
        expected = tw.attention(q, q, q, mask=tw.Dense(torch.arange(60) // 16 == number))
        torch.testing.assert_close(tw.attention(q, q, q, mask=mask), expected)
        torch.testing.assert_close(compiled(q, lists), expected)
    several = torch.stack([lists, lists - 1])
    mapped = torch.vmap(lambda q, lists: tw.attention(q, q, q, mask=tw.Blocks(lists, 16)), (None, 0))(q, several)
    for n, one in enumerate(several):
        torch.testing.assert_close(mapped[n], tw.attention(q, q, q, mask=tw.Blocks(one, 16)))


@LAYOUTS
@pytest.mark.parametrize("shape", ["BHMN", "1H1N", "B11N", "HM1", "MN", ""])
def test_biases_learn_in_packed_sequences(lengths, shape):
    m, n = tables(lengths)
    bias = draw(*[{"B": B, "H": H, "M": m, "N": n, "1": 1}[c] for c in shape]).requires_grad_()
    full = bias.expand(B, H, m, n)
    given = {"score": tw.Bias(bias), "bias": lambda b, m, n: full[b, :, :m, :n], "learned": [bias]}
    grads = check(lengths, **given, deterministic=True)
    again = check(lengths, **given, deterministic=True)
    assert all(map(torch.equal, grads, again))
    near = lambda b, m, n: (torch.arange(m)[:, None] + n - m - torch.arange(n)).abs() <= 20  # noqa: E731
    check(lengths, near, **given, mask=tw.Window(20, 20))


@LAYOUTS
@pytest.mark.parametrize("shape", [(H,), (B, H)])
def test_slopes_learn(lengths, shape):
    slopes = draw(*shape).requires_grad_()

    def penalty(b, m, n):
        distance = torch.arange(m)[:, None] + n - m - torch.arange(n)
        return -(slopes if slopes.ndim == 1 else slopes[b])[:, None, None] * distance.abs()

    check(lengths, bias=penalty, learned=[slopes], score=tw.Alibi(slopes))
    half = slopes.detach().bfloat16().requires_grad_()
    x, do = operands(lengths)
    (grad,) = torch.autograd.grad(ours(x, lengths, score=tw.Alibi(half)), half, do)
    assert grad.dtype == torch.bfloat16


def on_kernels(lengths, learned=(), **options):
    """The portable kernels in Triton's interpreter do what the CPU does; o and gradients."""
    pytest.importorskip("triton")
    x, do = operands(lengths)
    x, do = [t.detach().float().requires_grad_() for t in x], do.float()
    found = []
    for backend in ("triton", "cpu"):
        o = ours(x, lengths, backend=backend, **options)
        found.append((o, *torch.autograd.grad(o, (*x, *learned), do)))
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)
    return found[0]


@LAYOUTS
def test_slopes_learn_on_kernels(lengths):
    slopes = torch.rand(H, requires_grad=True)
    on_kernels(lengths, (slopes,), score=tw.Alibi(slopes), mask=tw.Causal())


TABLES = {
    "dense": (lambda m, n: tw.Dense(whole(2, B, H, m, n) > 0), lambda t, b, m, n: t[0][b, :, :m, :n]),
    "dense of keys": (lambda m, n: tw.Dense(whole(2, n) > 0), lambda t, b, m, n: t[0][:n].expand(m, n)),
    "documents": (lambda m, n: tw.Documents(whole(3, B, m), whole(3, B, n).int()),
                  lambda t, b, m, n: t[0][b, :m, None] == t[1][b, :n]),
    "padding": (lambda m, n: tw.Padding(whole(3, B, n) > 0), lambda t, b, m, n: t[0][b, :n].expand(m, n)),
    "spans": (lambda m, n: tw.Spans(torch.arange(m).expand(B, m) // 2, torch.arange(m).expand(B, m) + 3),
              lambda t, b, m, n: within(*[one[:, None, :, None] for one in t])(b, m, n)),
}  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_of_the_longest_sequence(name, lengths):
    make, rule = TABLES[name]
    mask = make(*tables(lengths))
    check(lengths, lambda b, m, n: rule(mask.tensors, b, m, n), mask=mask)

    def near(b, m, n):
        return rule(mask.tensors, b, m, n) & (torch.arange(n) <= torch.arange(m)[:, None] + n - m)

    check(lengths, near, mask=tw.Causal() & mask)


def test_rows_behind_a_sequence_may_hold_any_spans():
    lo = torch.arange(M).expand(B, M).clone()
    lo[0, 35:] = 0
    check(PACKED, within(lo[:, None, :, None], lo[:, None, :, None] + 9), mask=tw.Spans(lo, lo + 9))


@LAYOUTS
def test_blocks_join_other_masks(lengths):
    rows, _ = tables(lengths)
    lists = torch.tensor([[0, 2], [1, -1], [-1, -1]])[None, None, : -(-rows // 20)]
    blocks, seen = tw.Blocks(lists, (20, 16)), listed(lists, 20, 16)
    check(lengths, lambda b, m, n: ~seen(b, m, n), mask=~blocks)
    near = torch.arange(60)[:, None] - torch.arange(60)
    check(
        lengths,
        lambda b, m, n: seen(b, m, n) | (near[:m, :n].abs() < 4),
        mask=blocks | (lambda b, h, i, j: abs(i - j) < 4),
    )


@pytest.mark.parametrize("name", TABLES)
def test_tables_in_packed_sequences_on_kernels(name):
    on_kernels(PACKED, mask=TABLES[name][0](M, N))


def test_spans_by_head_and_blocks_on_kernels():
    on_kernels(PADDED, mask=tw.Spans(*spans(PADDED, H)))
    lists = torch.tensor([[[[0, 2], [1, -1], [2, 0]]]])
    bias = draw(H, M, N).float().requires_grad_()
    on_kernels(PACKED, (bias,), mask=tw.Blocks(lists, (20, 16)), score=tw.Bias(bias))


def test_a_captured_nan_that_the_mask_hides_changes_no_gradient():
    x, do = operands(PADDED)
    factor, shift = draw(52).abs(), draw(52).requires_grad_()
    with torch.no_grad():
        factor[40:] = torch.nan
        shift[40:] = torch.nan
    mask = tw.Padding(torch.tensor([40, 33]))
    o = ours(x, PADDED, mask=mask, score=[lambda s, b, h, i, j: s * factor[j] + shift[j], tw.SoftCap(9.0)])
    grads = torch.autograd.grad(o, (*x, shift), do)
    assert all([g.isfinite().all() for g in (o, *grads)])
    assert not grads[-1][40:].any()


@pytest.mark.parametrize("name", ["checkers", "two runs", "by head"])
def test_caches_take_functions_that_are_no_intervals(name):
    """Their rows count from the last key."""
    fn = {
        "checkers": lambda b, h, i, j: (i + j + b) % 3 > 0,
        "two runs": lambda b, h, i, j: (j < 4) | ((i - j <= 5) & (j <= i)),
        "by head": lambda b, h, i, j: (i - j) <= 3 * (h + 1),
    }[name]
    q, k, v = draw(2, 3, H, D), draw(2, 60, H_k, D), draw(2, 60, H_k, D)
    lengths = torch.tensor([41, 60])
    mask = tw.Mask.of(fn, align="last")
    o = tw.attention(q, k, v, mask=mask, layout=tw.Cached(lengths))
    for b, n in enumerate(lengths.tolist()):
        seen = mask.dense(3, n, 2, H).expand(2, H, 3, n)[b : b + 1]
        alone = tw.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], mask=tw.Dense(seen))
        torch.testing.assert_close(o[b : b + 1], alone)


def test_captures_have_an_entry_for_each_key_of_a_cache_and_each_head_and_sequence():
    q, k = draw(2, 3, H, D), draw(2, 60, H_k, D)
    gates = torch.zeros(2, 50)
    with pytest.raises(ValueError, match=r"at least 2 in dimension 0, which b indexes and 60 in dimension 1, which j"):
        tw.attention(q, k, k, score=tw.Score.of(lambda s, b, h, i, j: s + gates[b, j], align="last"),
                     layout=tw.Cached(torch.tensor([41, 50])))  # fmt: skip
    both = torch.zeros(3)
    with pytest.raises(ValueError, match="at least 4 in dimension 0, which b and h index"):
        tw.attention(q, k, k, score=lambda s, b, h, i, j: s + both[b] + both[h])
    q, k = draw(5, 3, H, D), draw(5, 60, H_k, D)
    four = torch.zeros(4)
    with pytest.raises(ValueError, match="at least 5 in dimension 0"):
        tw.attention(q, k, k, score=lambda s, b, h, i, j: s + four[b] + four[h])
