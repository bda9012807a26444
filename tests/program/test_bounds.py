"""Bounds of programs: tiles of masks against their entries and create_block_mask, limits of scores."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812, as everybody
from program import functions, masks, random_masks
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.program import Entries, keep, trace
from tilewise.program.arithmetic import COMPARISONS, RANGES, RULES
from tilewise.program.bounds import Grid, Ranges, _without_tensors, bounds, far, hides_later_keys, limits, look, tiles
from tilewise.program.ops import OPS

EXAMPLES = functions.examples()
MASKS_OF_1024, LONG = masks.masks(1024), masks.masks(8192)


def visible(program, tensors, numbers, grid):
    """Return (some, every), of the entries of each tile, by a look at all of them."""
    B, H, M, N, B_r, B_c, shift, first = grid
    at = Entries.of(B, H, M, N)
    seen = keep(program, at._replace(b=at.b + first, i=at.i + shift), tensors, numbers).expand(B, H, M, N)
    rows, columns = -(-M // B_r), -(-N // B_c)
    whole = [F.pad(seen, (0, columns * B_c - N, 0, rows * B_r - M), value=x) for x in (False, True)]
    some, every = [x.view(B, H, rows, B_r, columns, B_c) for x in whole]
    return some.any(5).any(3), every.all(5).all(3)


def check(fn, what, tensors, grid):
    """Check certain <= every, some <= possible, and that a look at open tiles gives both; return how many are open."""
    program, tensors, numbers = trace(fn, what, tensors)
    possible, certain = tiles(program, tensors, numbers, grid)
    some, every = visible(program, tensors, numbers, grid)
    assert not (certain & ~every).any()
    assert not (some & ~possible).any()
    found = look(program, tensors, numbers, grid, possible, certain)
    assert all([torch.equal(x.expand(y.shape), y) for x, y in zip(found, (some, every), strict=True)])
    return int((possible & ~certain).expand(some.shape).sum()), int((some & ~every).sum())


@pytest.mark.parametrize("tile", [(4, 4), (5, 3), (16, 8), (1, 1)])
@pytest.mark.parametrize("name", functions.MASKS)
def test_bounds_hold_for_masks(name, tile):
    example = EXAMPLES[name]
    sizes = functions.B, functions.H, functions.M, functions.N
    open_tiles, partial = check(example.fn, "mask", example.tensors, Grid(*sizes, *tile))
    assert open_tiles >= partial
    assert open_tiles == 0 or tile != (1, 1) or name == "odd_bits"


@pytest.mark.parametrize("name", masks.masks(48))
@pytest.mark.parametrize(("M", "N", "shift"), [(48, 48, 0), (37, 48, 11), (20, 41, 5), (1, 48, 47)])
def test_bounds_hold_with_other_sizes_and_alignments(name, M, N, shift):
    check(masks.masks(48)[name], "mask", (), Grid(masks.B, masks.H, M, N, 8, 16, shift))


@pytest.mark.parametrize("seed", range(150))
def test_bounds_hold_for_random_masks(seed):
    fn = random_masks.RandomMask(seed)
    M, N = random_masks.SIZE - 7, random_masks.SIZE
    check(fn, "mask", (), Grid(random_masks.B, random_masks.H, M, N, 4, 6, shift=seed % 7))


@pytest.mark.parametrize("name", MASKS_OF_1024)
def test_tiles_are_those_of_create_block_mask(name):
    """Bounds alone give its lists, of full and of partial tiles."""
    n, fn = 1024, MASKS_OF_1024[name]
    program, tensors, numbers = trace(fn, "mask")
    possible, certain = tiles(program, tensors, numbers, Grid(masks.B, masks.H, n, n, 128, 128))
    B, H = [len(x) if len(x) > 1 else None for x in (possible, possible[0])]
    lists = create_block_mask(fn, B, H, n, n, device="cpu")
    across = torch.arange(n // 128)
    full, partial = [
        torch.zeros_like(possible).scatter_(-1, which.long(), across < count[..., None])
        for which, count in (
            (lists.full_kv_indices, lists.full_kv_num_blocks),
            (lists.kv_indices, lists.kv_num_blocks),
        )
    ]
    assert torch.equal(certain, full)
    assert torch.equal(possible, full | partial)


class Work(TorchDispatchMode):
    """Counts operations, and the numbers that they return."""

    def __init__(self):
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given, made = [[t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), found)]
        known = {t.untyped_storage().data_ptr() for t in given}  # of which some results are views
        self.operations += 1
        self.numbers += sum([t.numel() for t in made if t.untyped_storage().data_ptr() not in known])
        return found


@pytest.mark.parametrize("name", masks.masks(48))
def test_tiles_of_long_sequences_take_a_millisecond(name):
    """By count, as clocks depend on the machine: 5 us an operation, 1 us for 1,000 numbers."""
    n = 8192
    program, tensors, numbers = trace(LONG[name], "mask")
    _without_tensors.cache_clear()
    bounds(program.text)
    with Work() as work:
        possible, certain = tiles(program, tensors, numbers, Grid(masks.B, masks.H, n, n, 128, 128))
    assert possible.shape[2:] == certain.shape[2:] == (64, 64)
    assert work.operations < 160
    assert work.numbers < 400_000


def test_a_mask_without_tensors_is_bounded_once():
    program, tensors, numbers = trace(lambda b, h, i, j, left: (j <= i) & (i - j <= left), "mask", (9,))
    first = tiles(program, tensors, numbers, Grid(1, 1, 64, 64, 8, 8))
    with Work() as work:
        assert tiles(program, tensors, numbers, Grid(1, 1, 64, 64, 8, 8)) is first
    assert work.operations == 0
    other = tiles(program, tensors, (30,), Grid(1, 1, 64, 64, 8, 8))
    assert not torch.equal(other[0], first[0])


def test_numbers_given_to_a_mask():
    """They bound nothing in the text, and everything in a call: divisors of either sign, too."""

    def fn(b, h, i, j, n, width, share):
        return (i // n == j // n) & (abs(i - j) % n <= width) & (j * share <= i)

    for numbers in ((5, 2, 0.7), (-3, -1, 1.1), (1, 0, -2.0)):
        check(fn, "mask", numbers, Grid(1, 1, 30, 25, 4, 4))


def test_a_tensor_of_large_numbers_and_one_that_ranges_leave():
    ids = torch.tensor([2**53, 2**53 + 1, 2**60, -(2**60)] * 6)
    check(lambda b, h, i, j: ids[i] == ids[j], "mask", (), Grid(1, 1, 24, 24, 1, 2))
    check(lambda b, h, i, j: ids[i - 3] <= ids[j - 12], "mask", (), Grid(1, 1, 24, 24, 4, 4))
    check(lambda b, h, i, j: ids.double()[i - 3] <= ids.bool()[j - 12], "mask", (), Grid(1, 1, 24, 24, 4, 4))


def test_double_precision_numbers_are_bounded_as_such():
    """Numbers that are equal in fp32 are not in fp64, in which logits of that type are computed."""
    x = torch.tensor([1.0, 1.0 + 2.0**-40], dtype=torch.float64)
    program, tensors, _ = trace(lambda b, h, i, j: x[i] < x[j], "mask")
    grid = Grid(1, 1, 2, 2, 1, 1)
    for real, want in ((torch.float64, [[False, True], [False, False]]), (torch.float32, [[False] * 2] * 2)):
        possible, certain = tiles(program, tensors, (), grid, real)
        assert possible[0, 0].tolist() == certain[0, 0].tolist() == want


@pytest.mark.parametrize("shape", [(23,), (4, 9), (3, 7, 8)])
def test_ranges(shape):
    """Least and greatest between two indices a dimension, where they count from the end, too."""
    draw = torch.Generator().manual_seed(0)
    t = torch.randint(-50, 50, shape, generator=draw)
    ranges = Ranges(t)
    ends = []
    for n in shape:
        lo = torch.randint(0, n, (40,), generator=draw)
        hi = torch.minimum(lo + torch.randint(0, n, (40,), generator=draw), torch.tensor(n - 1))
        back = torch.randint(0, 2, (40,), generator=draw) * n
        ends += [lo - back, hi - back]
    for m in range(40):
        part = t[
            tuple([slice(lo[m] % n, hi[m] % n + 1) for n, lo, hi in zip(shape, ends[::2], ends[1::2], strict=True)])
        ]
        assert ranges.least[tuple(ends)][m] == part.min()
        assert ranges.greatest[tuple(ends)][m] == part.max()


BOUNDED = {
    "softcap": (lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), (-30, 30)),
    "clamped": (lambda s, b, h, i, j: s.clamp(-30, 30), (-30, 30)),
    "sigmoid": (lambda s, b, h, i, j: 10 * torch.sigmoid(s), (0, 10)),
    "by distance": (lambda s, b, h, i, j: torch.tanh(s) * torch.exp(-abs(i - j)) - (i % 7) / 4, (-2.5, 1)),
    "wave": (lambda s, b, h, i, j: torch.where(i > j, torch.sin(s), s.clamp(0, 1) ** 2), (-1, 1)),
    "root": (lambda s, b, h, i, j: -torch.rsqrt(s * s + 4.0), (-0.5, 0)),
}
UNBOUNDED = {
    "half clamped": lambda s, b, h, i, j: s.clamp(max=30),
    "distance": lambda s, b, h, i, j: torch.tanh(s) - abs(i - j),
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, torch.tanh(s), -math.inf),
    "captured": lambda s, b, h, i, j: torch.tanh(s) * torch.ones(3)[h],
    "added": lambda s, b, h, i, j: torch.tanh(s) + s,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_scores_with_limits(name):
    fn, want = BOUNDED[name]
    assert limits(trace(fn, "score").program.text) == want


@pytest.mark.parametrize("name", UNBOUNDED)
def test_scores_without_limits(name):
    assert limits(trace(UNBOUNDED[name], "score").program.text) is None


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda s, b, h, i, j: s - 0.5 * abs(i - j), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), False),
        (lambda s, b, h, i, j: s + torch.where(i > 2000, -3.0, 0.0), False),
        (lambda s, b, h, i, j: torch.where(i >= j, s, -1e9), True),
        (lambda s, b, h, i, j: s + torch.where(i > 5, 0, -(10**9)), True),
        (lambda s, b, h, i, j: s + torch.zeros(3)[h], True),
    ],
)
def test_scores_that_move_a_row_s_logits_far(fn, want):
    assert far(trace(fn, "score").program.text) == want


@pytest.mark.parametrize("name", functions.MASKS)
def test_masks_that_hide_later_keys(name):
    program = trace(EXAMPLES[name].fn, "mask", EXAMPLES[name].tensors).program
    hides = {"causal", "window", "document_causal", "window_per_head", "sinks_and_window", "token_tree"}
    assert hides_later_keys(program.text) == (name in hides)


@pytest.mark.parametrize(("fn", "hides"), [
    (lambda b, h, i, j: 2 * j <= 2 * i + 1, True),
    (lambda b, h, i, j: 3 * j <= 2 * i + 4, False),
    (lambda b, h, i, j: (i < 0) | (j <= i), False),
    (lambda b, h, i, j: torch.where(h == 0, j < i, (j == i) & (b > 0)), True),
    (lambda b, h, i, j: ~(j > i) & (torch.tanh(i / j) <= 2), True),
    (lambda b, h, i, j: ~(torch.tanh(i / j) <= 2), False),
])  # fmt: skip
def test_masks_that_hide_later_keys_by_their_text(fn, hides):
    assert hides_later_keys(trace(fn, "mask").program.text) == hides


def test_operations_with_bounds():
    """The others bound nothing: a tile that reads them stays open."""
    bounded = {name.split()[0] for name in RULES} | set(RANGES) | set(COMPARISONS)
    assert set(OPS) - bounded == {"pow"}
