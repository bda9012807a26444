"""Shapes of masks: their classes, and intervals of keys and of rows against every entry."""

import pytest
import torch
from program import functions, masks, random_masks

from tilewise.program import Entries, keep, run, trace
from tilewise.program.shape import OPEN, shape

EXAMPLES = functions.examples()
CLASSES = {
    "causal": "A1", "window": "A1", "prefix_lm": "A1", "document": "B", "document_causal": "B1", "dilated": "B",
    "natten": "B", "sliding_tiles": "B", "block_diffusion": "B", "longformer": "B", "window_per_head": "B1",
    "sinks_and_window": "B2", "padding": "A1", "padding_of_both": "A1", "shared_prefix": "B2", "token_tree": "B",
    "flamingo": "B", "listed_blocks": "B", "stripes": "B", "random_keys": "B", "not_near": "B2", "sloped": "A1",
    "direction_by_head": "B2", "odd_bits": "B", "everything": "A1", "counted": "B",
}  # fmt: skip
"""The class of each of the 26 masks, and of how many intervals it is a union."""
MORE = {
    "causal": "A1", "sliding_window": "A1", "both_sides": "A1", "not_near": "B2", "sloped": "A1",
    "block_diagonal": "A1", "chunks": "A1", "chunks_before": "A1", "late_rows": "A1", "few_global": "B3",
    "sinks_and_window": "B2", "window_per_head": "B1", "direction_by_head": "B2", "dilated": "B", "stripes": "B",
    "natten": "B", "disc": "B", "sliding_tiles": "B", "block_diffusion": "B", "prefix_lm": "A1", "padding": "A1",
    "padding_of_both": "A1", "batched": "A1", "document": "B", "document_causal": "B", "document_starts": "B1",
    "shared_prefix": "B2", "longformer": "B", "flamingo": "B", "token_tree": "B", "listed_blocks": "B",
}  # fmt: skip
RULES = {
    "nothing": (lambda b, h, i, j: (j < 3) & (j > 3), "A1"),
    "late keys": (lambda b, h, i, j: j >= 5, "A1"),
    "strictly": (lambda b, h, i, j: (j < i) & (j > i - 7), "A1"),
    "from the left": (lambda b, h, i, j: -2 * j + i <= -5, "A1"),
    "twice": (lambda b, h, i, j: (2 * i >= 3 * j) & (j + j + 1 > i - 9), "A1"),
    "both read j": (lambda b, h, i, j: 3 * j - i <= j + 4, "A1"),
    "abs on the right": (lambda b, h, i, j: 4 <= (j - i).abs(), "B2"),
    "min and max": (lambda b, h, i, j: torch.minimum(j, i + 3) <= torch.maximum(j * 2 - 9, i), "B"),
    "min": (lambda b, h, i, j: torch.minimum(j, 2 * j - i) <= i, "A1"),
    "max": (lambda b, h, i, j: torch.maximum(j - i, -3 - j) <= 2, "A1"),
    "clamped": (lambda b, h, i, j: (j - i).clamp(-5, 5) == -5, "A1"),
    "clamped row": (lambda b, h, i, j: (j >= (i - 4).clamp(3, 9)) & (j <= i.clamp(max=20) + i // 3), "B1"),
    "rounded": (lambda b, h, i, j: (j // 4 - 1 <= i // 4) & (-(j // 3) <= 2 - i // 3), "A1"),
    "negative steps": (lambda b, h, i, j: (5 - j) * -2 <= -(-i // 3) + 1, "A1"),
    "where": (lambda b, h, i, j: torch.where(j < 8, j <= i, i - j < 4), "B2"),
    "a number where": (lambda b, h, i, j: torch.where(j < 8, j * 2, j) <= i, "B2"),
    "equal bools": (lambda b, h, i, j: (j < 9) == (i < 9), "B2"),
    "either": (lambda b, h, i, j: (j < 9) ^ (i < j), "B4"),
    "one key": (lambda b, h, i, j: j == 2 * i - 3, "A1"),
    "all but one": (lambda b, h, i, j: j != i, "B2"),
    "early rows": (lambda b, h, i, j: (i < 7) & (j <= 2 * i), "A1"),
    "some rows": (lambda b, h, i, j: (i >= 3) & (i <= 9) & (j >= i // 2), "A1"),
    "odd rows": (lambda b, h, i, j: (i % 2 == 1) & (j <= i), "B1"),
    "falling": (lambda b, h, i, j: j <= 20 - i, "B1"),
    "by batch": (lambda b, h, i, j: (j <= i + 2 * b) & (i - j < 5 - b), "A1"),
    "by bits": (lambda b, h, i, j: (i ^ j) & 1 == 0, "C"),
    "sums of rows": (lambda b, h, i, j: 3 * i - j >= i + 2 * i - (i - 3), "A1"),
    "many": (lambda b, h, i, j: sum([(j == i - 3 * n).long() for n in range(9)]) > 0, "B"),
    "nine": (lambda b, h, i, j: any_of([j == 3 * n for n in range(9)]), "B"),
    "eight": (lambda b, h, i, j: any_of([j == 3 * n for n in range(8)]), "B8"),
    "floating": (lambda b, h, i, j: j <= 0.5 * i, "B"),
}  # fmt: skip


def any_of(bools):
    found = bools[0]
    for x in bools[1:]:
        found = found | x
    return found


def check(fn, tensors, sizes, shift=0):
    """Check intervals against entries, ends that never decrease, and rows; return the class and how many there are."""
    B, H, M, N = sizes
    program, tensors, numbers = trace(fn, "mask", tensors)
    at = Entries.of(B, H, M, N)
    at = at._replace(i=at.i + shift)
    truth = keep(program, at, tensors, numbers).expand(B, H, M, N)
    found = shape(program.text)
    if found.ends is None:
        return found.name
    ends = run(found.ends, at._asdict(), tensors, numbers)
    seen = any_of([(at.j >= lo) & (at.j < hi) for lo, hi in zip(ends[::2], ends[1::2], strict=True)])
    assert torch.equal(seen.expand(truth.shape), truth)
    if found.name == "A":
        own = {"b": at.b, "i": at.i}
        for end in run(found.keys, own, tensors, numbers):
            assert (end.expand(B, 1, M, 1).diff(dim=2) >= 0).all()
        lo, hi = run(found.queries, {"b": at.b, "j": at.j}, tensors, numbers)
        assert torch.equal(((at.i >= lo) & (at.i < hi)).expand(truth.shape), truth)
    else:
        assert found.keys is None
        assert found.queries is None
    return found.name + str(len(ends) // 2)


@pytest.mark.parametrize("name", functions.MASKS)
def test_the_class_of_each_mask(name):
    sizes = functions.B, functions.H, functions.M, functions.N
    assert check(EXAMPLES[name].fn, EXAMPLES[name].tensors, sizes) == CLASSES[name]


@pytest.mark.parametrize(("M", "N", "shift"), [(48, 48, 0), (37, 48, 11), (20, 41, 0), (1, 48, 47)])
@pytest.mark.parametrize("name", MORE)
def test_the_class_of_each_mask_of_users(name, M, N, shift):
    assert check(masks.masks(48)[name], (), (masks.B, masks.H, M, N), shift) == MORE[name]


@pytest.mark.parametrize("shift", [0, -9, 6])
@pytest.mark.parametrize("name", RULES)
def test_comparisons_are_solved(name, shift):
    fn, want = RULES[name]
    assert check(fn, (), (2, 2, 29, 25), shift) == want


@pytest.mark.parametrize("seed", range(150))
def test_random_masks(seed):
    sizes = random_masks.B, random_masks.H, random_masks.SIZE - 7, random_masks.SIZE
    check(random_masks.RandomMask(seed, floating=False), (), sizes, seed % 7)


def test_numbers_given_to_a_mask():
    assert check(lambda b, h, i, j, left, right: (i - j <= left) & (j - i <= right), (3, 2), (1, 1, 20, 22)) == "A1"
    assert check(lambda b, h, i, j, n: i // n == j // n, (3,), (1, 1, 20, 22)) == "B"


def test_texts_of_intervals():
    """Sums of numbers are one number, and intervals with one open end are one."""
    found = shape(trace(lambda b, h, i, j: (j < 8) | (j < i - 3), "mask").program.text)
    assert found is shape(trace(lambda b, h, i, j: (j < 8) | (j < i - 3), "mask").program.text)
    assert found.keys.nodes == (("in", "i"), ("lit", 8), ("lit", -3), ("add", 0, 2), ("max", 3, 1), ("lit", -OPEN))
    assert found.keys.outputs == (5, 4)
    window = shape(trace(lambda b, h, i, j: i - j < 4, "mask").program.text)
    assert window.keys.nodes == (("in", "i"), ("lit", -3), ("add", 0, 1), ("lit", OPEN))


def test_shared_and_nested_conditions_take_no_time():
    """Nodes that are read twice are solved once; conditions in conditions are given up."""

    def shared(b, h, i, j):
        row, seen = i, j <= i
        for n in range(60):
            row = torch.maximum(row - n, row // 2)
            seen = seen & (seen | (j <= row))
        return seen & (j <= row)

    def nested(b, h, i, j):
        return any_of([j == 3 * n for n in range(800)])

    assert check(shared, (), (1, 1, 20, 22)) == "B1"
    assert shape(trace(nested, "mask").program.text).name == "B"
