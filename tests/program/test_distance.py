"""Scores that read tables by distance: the same results and gradients as without, and which scores do."""

import pytest
import torch
from program import functions

import tilewise as tw
from tilewise.program.distance import split
from tilewise.values import by_distance

N = functions.N
SPLIT = {
    name
    for name, given in functions.examples().items()
    if given.what == "score" and split(tw.Score.of(given.fn, *given.tensors).text, len(given.tensors), 9)
}
"""Those of the functions that compute much of i - j alone."""
fp64 = torch.float64


def draw(M, N):
    made = torch.Generator().manual_seed(1)
    return [torch.randn(2, n, functions.H, 8, generator=made, dtype=fp64) for n in (M, N, N)]


def results(score, operands, learned, **options):
    """o, lse, and all gradients."""
    leaves = [*(t.clone().requires_grad_() for t in operands), *learned]
    o, lse = tw.attention(*leaves[:3], score=score, return_lse=True, **options)
    kept = lse.masked_fill(lse.isinf(), 0.0)
    found = torch.autograd.grad(o.sin().sum() + kept.sum(), leaves, allow_unused=True)
    return o, kept, *[torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]


def both(monkeypatch, fn, *tensors, operands=(), align="first", **options):
    """The results with tables and without."""
    for many in (0, 1 << 60):
        monkeypatch.setattr(by_distance, "MANY", many)
        learned = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        score = tw.Score.of(fn, *learned, align=align)
        yield results(score, operands or draw(functions.M, N), [t for t in learned if t.requires_grad], **options)


def assert_alike(found, true):
    for got, want in zip(found, true, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_functions_that_compute_much_by_distance_are_found():
    assert {"t5", "kerple", "sandwich", "fire"} <= SPLIT
    assert not SPLIT & {"alibi", "alibi_learned", "relative", "softcap", "gated", "forgetting", "two_tables"}


@pytest.mark.parametrize(("name", "align"), [*((name, "first") for name in sorted(SPLIT)), ("t5", "last")])
def test_a_table_gives_the_same_results_and_gradients(name, align, monkeypatch):
    given = functions.examples()[name].to(fp64)
    assert_alike(*both(monkeypatch, given.fn, *given.tensors, align=align, mask=tw.Window(9, 4)))


@pytest.mark.parametrize("name", ["t5", "kerple"])
def test_packed_sequences_share_a_table(name, monkeypatch):
    given = functions.examples()[name].to(fp64)
    cu = torch.tensor([0, 5, 21], dtype=torch.int32)
    packed = {"operands": [t[0] for t in draw(21, 21)], "layout": tw.Varlen(cu, cu, 16, 16)}
    assert_alike(*both(monkeypatch, given.fn, *given.tensors, **packed))


def test_what_hidden_distances_give_stays_out_of_gradients(monkeypatch):
    rate = torch.tensor(0.5, dtype=fp64).requires_grad_()

    def rooted(s, b, h, i, j, rate):
        return s - rate * torch.sqrt(rate * (i - j) + torch.log((i - j) * 1.0)).clamp(max=1e3)

    found, true = both(monkeypatch, rooted, rate, mask=lambda b, h, i, j: i > j + 2)
    assert all(torch.isfinite(t).all() for t in found)
    assert_alike(found, true)


def test_a_captured_tensor_is_0_outside_as_in_kernels(monkeypatch):
    short = torch.randn(4, dtype=fp64).requires_grad_()

    def near(s, b, h, i, j, short):
        n = (i - j).abs()
        return s + torch.where(n < 4, torch.exp(short[n]) * n, 0.0)

    monkeypatch.setattr(by_distance, "MANY", 0)
    found = results(tw.Score.of(near, short), draw(20, 20), [short])
    assert all(torch.isfinite(t).all() for t in found)
    monkeypatch.setattr(by_distance, "MANY", 1 << 60)
    with pytest.raises(IndexError):  # without a table, as of any index in PyTorch
        results(tw.Score.of(near, short), draw(20, 20), [short])


def test_new_contents_count(monkeypatch):
    monkeypatch.setattr(by_distance, "MANY", 0)
    given = functions.examples()["t5"]
    table = given.tensors[0].detach().clone()
    score, operands = tw.Score.of(given.fn, table), [t.float() for t in draw(20, 20)]
    for _ in range(3):
        table.mul_(2.0)
        found = tw.attention(*operands, score=score)
        true = tw.attention(*operands, score=tw.Score.of(given.fn, table.clone()))
        torch.testing.assert_close(found, true)
    monkeypatch.setattr(by_distance, "MANY", 1 << 60)
    torch.testing.assert_close(found, tw.attention(*operands, score=score))


def test_few_entries_have_no_table(monkeypatch):
    made = []
    monkeypatch.setattr(by_distance, "_by_distance", lambda score, *given: made.append(score) or score)
    given = functions.examples()["t5"]
    for many, count in ((1 << 24, 0), (0, 1)):
        monkeypatch.setattr(by_distance, "MANY", many)
        tw.attention(*[t.float() for t in draw(20, 20)], score=tw.Score.of(given.fn, *given.tensors), scale=1.0 + count)
        assert len(made) == count
