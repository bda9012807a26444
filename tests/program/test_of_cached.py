"""Masks that are functions, with keys in a cache on the CPU: only keys that a row may see are read."""

import pytest
import torch

import tilewise as tw

B, M, N, H, D, PAGE = 3, 4, 96, 2, 8, 8
LENGTHS = torch.tensor([7, 96, 50], dtype=torch.int32)
offsets = torch.tensor([0, 3, 9])
first = torch.tensor([2, 40, 8])


def window(b, h, i, j):
    return (j <= i) & (i - j <= 12)


def window_by_sequence(b, h, i, j):
    return (j <= i) & (i - j <= 4 + offsets[b])


def from_first(b, h, i, j):
    return (j >= first[b]) & (j <= i)


def blocks(b, h, i, j):
    return (i // 16 == j // 16) & (j <= i)


def sinks(b, h, i, j):
    return (j <= i) & ((j < 2) | (i - j <= 12))


def by_head(b, h, i, j):
    return (j <= i) & (i - j <= 12 * (h + 1))


def odd(b, h, i, j):
    return (j <= i) & (((i ^ j) & 1 == 0) | (j == i))


OF_CLASS_A = window, window_by_sequence, from_first, blocks
OTHERS = sinks, by_head, odd


def operands(rows):
    torch.manual_seed(0)
    return torch.randn(B, rows, H, D), torch.randn(B, N, H, D), torch.randn(B, N, H, D)


def dense(fn, b, rows):
    """Return what some last rows of a sequence see, (H, rows, keys)."""
    n = int(LENGTHS[b])
    return tw.Mask.of(fn, align="last").dense(rows, n, B, H).expand(B, H, rows, n)[b]


def alone(fn, b, q, k, v):
    """Return a sequence's result by a dense mask of its own."""
    n = int(LENGTHS[b])
    mask = tw.Dense(dense(fn, b, q.shape[1]))
    return tw.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], mask=mask)


@pytest.mark.parametrize("rows", [1, M])
@pytest.mark.parametrize("invariant", [0, 64])
@pytest.mark.parametrize("fn", [*OF_CLASS_A, *OTHERS], ids=lambda fn: fn.__name__)
def test_functions_with_a_cache_agree_with_dense_masks(fn, invariant, rows):
    q, k, v = operands(rows)
    mask = tw.Mask.of(fn, align="last") & tw.Causal()
    o = tw.attention(q, k, v, mask=mask, layout=tw.Cached(LENGTHS, invariant=invariant))
    for b in range(B):
        torch.testing.assert_close(o[b : b + 1], alone(fn, b, q, k, v))


@pytest.mark.parametrize("fn", OF_CLASS_A, ids=lambda fn: fn.__name__)
def test_pages_that_no_row_sees_are_not_read(fn):
    """Their entries of the table may be no pages, and their keys are NaN."""
    q, k, v = operands(M)
    table = torch.arange(B * N // PAGE).view(B, -1).int()
    pages_k, pages_v = [t.reshape(-1, PAGE, H, D).clone() for t in (k, v)]
    for b in range(B):
        keys = dense(fn, b, M).any(0).any(0).nonzero()
        for page in range(N // PAGE):
            if page < int(keys.min()) // PAGE or page > int(keys.max()) // PAGE:
                pages_k[table[b, page]] = pages_v[table[b, page]] = torch.nan
                table[b, page] = -1
    assert (table < 0).sum() > B
    o = tw.attention(q, pages_k, pages_v, mask=tw.Mask.of(fn, align="last"), layout=tw.Cached(LENGTHS, table))
    for b in range(B):
        torch.testing.assert_close(o[b : b + 1], alone(fn, b, q, k, v))


@pytest.mark.parametrize("fn", [*OF_CLASS_A, *OTHERS], ids=lambda fn: fn.__name__)
def test_rows_from_the_first_are_refused(fn):
    q, k, v = operands(M)
    with pytest.raises(tw.Unsupported, match=rf"{fn.__name__} \(.*does not go with Cached.*align=\"last\""):
        tw.attention(q, k, v, mask=fn, layout=tw.Cached(LENGTHS))
