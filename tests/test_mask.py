"""Masks: what they show, how they compose, and that the three ways they say it agree."""

import pytest
import torch

import tilewise as tw
from tilewise.program import Entries
from tilewise.values.intervals import PaddingKeys, PaddingLengths, PaddingRange
from tilewise.values.value import OPEN


def rows(mask, M, N):
    """The mask of one batch entry and head, as strings."""
    seen = mask.dense(M, N).expand(1, 1, M, N)[0, 0]
    return ["".join(".x"[int(entry)] for entry in row) for row in seen]


def test_full_shows_all():
    assert rows(tw.Full(), 2, 3) == ["xxx", "xxx"]


def test_causal_is_aligned_to_the_last_key():
    assert rows(tw.Causal(), 3, 3) == ["x..", "xx.", "xxx"]
    assert rows(tw.Causal(), 2, 4) == ["xxx.", "xxxx"]
    assert rows(tw.Causal(), 4, 2) == ["..", "..", "x.", "xx"]


def test_window_is_aligned_to_the_last_key():
    assert rows(tw.Window(1, 0), 4, 4) == ["x...", "xx..", ".xx.", "..xx"]
    assert rows(tw.Window(0, 1), 3, 4) == [".xx.", "..xx", "...x"]
    assert rows(tw.Window(None, 0), 3, 3) == rows(tw.Causal(), 3, 3)
    assert rows(tw.Window(0, None), 3, 3) == ["xxx", ".xx", "..x"]
    assert rows(tw.Window(None, None), 2, 2) == ["xx", "xx"]
    assert rows(tw.Window(0, 0), 3, 2) == ["..", "x.", ".x"]
    assert rows(tw.Window(2**40, 2**40), 2, 2) == ["xx", "xx"]


def test_prefix_shows_the_prefix_to_all_then_left_to_right():
    assert rows(tw.Prefix(torch.tensor([2])), 4, 4) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows(tw.Prefix(torch.tensor([0])), 3, 3) == rows(tw.Causal(), 3, 3)
    assert rows(tw.Prefix(torch.tensor([3], dtype=torch.int32)), 3, 3) == ["xxx"] * 3
    assert rows(tw.Prefix(torch.tensor([1])), 3, 2) == ["x.", "x.", "xx"]


def test_padding_hides_keys_not_queries():
    assert rows(tw.Padding(torch.tensor([2])), 3, 4) == ["xx.."] * 3
    assert rows(tw.Padding(torch.tensor([0])), 2, 2) == [".."] * 2
    assert rows(tw.Padding(torch.tensor([[True, False, True]])), 2, 3) == ["x.x"] * 2


def test_documents_see_their_own():
    mask = tw.Documents(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]))
    assert rows(mask, 3, 4) == ["x...", "x...", ".xx."]


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3), (1, 2, 3), (1, 1, 2, 3), (1, 1, 1, 3)])
def test_dense_broadcasts(shape):
    seen = torch.rand(shape) < 0.5
    assert torch.equal(tw.Dense(seen).dense(2, 3).expand(1, 1, 2, 3), seen.expand(1, 1, 2, 3))


def test_masks_differ_by_batch_entry():
    seen = tw.Padding(torch.tensor([1, 3])).dense(2, 3)
    assert seen.shape == (2, 1, 2, 3)
    assert seen[:, 0].tolist() == [[[True, False, False]] * 2, [[True, True, True]] * 2]


MASKS = {
    "causal": tw.Causal,
    "window": lambda: tw.Window(3, 2),
    "prefix": lambda: tw.Prefix(torch.tensor([4, 0])),
    "padding": lambda: tw.Padding(torch.tensor([7, 2])),
    "padding range": lambda: tw.Padding(torch.tensor([7, 2]), starts=torch.tensor([3, 2])),
    "padding bool": lambda: tw.Padding(torch.rand(2, 9) < 0.5),
    "documents": lambda: tw.Documents(torch.randint(3, (2, 6)), torch.randint(3, (2, 9))),
    "dense": lambda: tw.Dense(torch.rand(2, 3, 6, 9) < 0.5),
}


@pytest.mark.parametrize("first", MASKS)
@pytest.mark.parametrize("second", MASKS)
def test_and_shows_what_both_show(first, second):
    a, b = MASKS[first](), MASKS[second]()
    both = (a & b).dense(6, 9)
    assert torch.equal(both.expand(2, 3, 6, 9), (a.dense(6, 9) & b.dense(6, 9)).expand(2, 3, 6, 9))
    assert torch.equal((b & a).dense(6, 9).expand(2, 3, 6, 9), both.expand(2, 3, 6, 9))


PADDED = {
    "nothing": ([[1, 1, 1], [1, 1, 1]], tw.Full),
    "right": ([[1, 1, 0], [0, 0, 0]], PaddingLengths),
    "left": ([[0, 1, 1], [1, 1, 1]], PaddingRange),
    "both sides": ([[0, 1, 0], [0, 0, 0]], PaddingRange),
    "holes": ([[1, 0, 1], [1, 1, 1]], PaddingKeys),
    "no keys": ([[], []], tw.Full),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_of_a_mask_is_the_cheapest_kind(name):
    rows, kind = PADDED[name]
    real = torch.tensor(rows).bool()
    mask = tw.Padding.of(real)
    assert type(mask) is kind
    assert torch.equal(mask.dense(2, real.shape[1]).expand(2, 1, 2, -1), real[:, None, None].expand(-1, 1, 2, -1))


def test_full_is_the_neutral_element():
    mask = tw.Causal()
    assert (mask & tw.Full()).parts == (mask,)
    assert (tw.Full() & mask).parts == (mask,)
    assert (tw.Full() & tw.Full()).parts == ()


def test_and_is_associative():
    a, b, c = tw.Causal(), tw.Window(2, None), tw.Window(None, 1)
    assert ((a & b) & c).parts == (a & (b & c)).parts == (a, b, c)


def test_and_takes_masks_only():
    with pytest.raises(TypeError):
        tw.Causal() & torch.ones(2, 2).bool()


@pytest.mark.parametrize("name", ["causal", "window", "prefix", "padding", "padding range"])
@pytest.mark.parametrize(("M", "N"), [(6, 9), (9, 9), (9, 6)])
def test_intervals_never_move_left_and_show_what_dense_shows(name, M, N):
    mask = MASKS[name]()
    j = torch.arange(N)
    before = (-OPEN, -OPEN)
    for i in range(M):
        lo, hi = (int(torch.as_tensor(end).reshape(-1)[0]) for end in mask.keys(i + N - M))
        assert before[0] <= lo
        assert before[1] <= hi
        assert torch.equal((j >= lo) & (j < hi), mask.dense(M, N).expand(2, 1, M, N)[0, 0, i])
        before = lo, hi


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_its_numbers_and_its_tensors(name):
    mask = MASKS[name]()
    again = type(mask).rebuild(mask.plain[1:], mask.tensors)
    assert torch.equal(again.dense(6, 9), mask.dense(6, 9))
    assert hash(mask.plain) == hash(again.plain)


@pytest.mark.parametrize("name", MASKS)
def test_a_tile_of_a_mask_is_read_by_views(name):
    mask = MASKS[name]()
    whole = mask.dense(6, 9).expand(2, 3, 6, 9)
    for at in (
        (slice(1, 2), slice(0, 3), slice(2, 6), slice(3, 9)),
        (slice(0, 2), slice(1, 2), slice(0, 6), slice(2, 3)),
    ):
        seen = mask.keep(Entries.at(at, 3))
        assert torch.equal(seen.expand(whole[at].shape), whole[at])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: tw.Window(-1, 0), ValueError, ["Window", "left", "-1", ">= 0", "None"]),
        (lambda: tw.Window(0, -3), ValueError, ["Window", "right", "-3", ">= 0"]),
        (lambda: tw.Window(1.5, 0), TypeError, ["Window", "left", "1.5", "int"]),
        (lambda: tw.Window(0, True), TypeError, ["Window", "right", "True", "int"]),
        (lambda: tw.Prefix(torch.tensor([1.0])), TypeError, ["Prefix", "lengths", "float32", "int32 or int64"]),
        (lambda: tw.Prefix([1, 2]), TypeError, ["Prefix", "lengths", "list", "tensor"]),
        (lambda: tw.Prefix(torch.tensor([[1]])), ValueError, ["Prefix", "lengths", "(1, 1)", "(B,)"]),
        (lambda: tw.Padding(torch.tensor([1.0])), TypeError, ["Padding", "lengths", "float32", "int32 or int64"]),
        (lambda: tw.Padding(torch.tensor([True])), ValueError, ["Padding", "(1,)", "(B, N)"]),
        (lambda: tw.Padding(torch.tensor(3)), ValueError, ["Padding", "()", "(B,)"]),
        (lambda: tw.Padding(torch.tensor([3]), torch.tensor([1.0])), TypeError, ["Padding", "starts", "float32"]),
        (lambda: tw.Padding(torch.tensor([3]), torch.tensor(1)), ValueError, ["Padding", "starts", "()", "(B,)"]),
        (lambda: tw.Padding(torch.ones(1, 2).bool(), torch.tensor([1])), ValueError, ["Padding", "starts", "bool"]),
        (lambda: tw.Padding.of(torch.ones(1, 2)), TypeError, ["Padding", "float32", "bool"]),
        (lambda: tw.Padding.of(torch.ones(2).bool()), ValueError, ["Padding", "(2,)", "(B, N)"]),
        (lambda: tw.Padding(3), TypeError, ["Padding", "int", "tensor"]),
        (
            lambda: tw.Documents(torch.zeros(1, 2), torch.zeros(1, 2)),
            TypeError,
            ["Documents", "q_ids", "float32", "int32 or int64"],
        ),
        (
            lambda: tw.Documents(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
            ValueError,
            ["Documents", "k_ids", "(2,)", "(B, length)"],
        ),
        (lambda: tw.Dense(torch.ones(2, 2)), TypeError, ["Dense", "float32", "bool"]),
        (lambda: tw.Dense(torch.ones(1, 1, 1, 2, 2).bool()), ValueError, ["Dense", "5", "(B, H, M, N)"]),
    ],
)
def test_a_wrong_value_says_what_is_wrong(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == []
