"""Which tiles the kernels compute: those with an entry that the mask leaves, each once, by the mask written out."""

from itertools import combinations

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tilewise.attention.explain import problem_on
from tilewise.call.check import check_arguments
from tilewise.host.arguments import odd
from tilewise.host.lists import tile_lists
from tilewise.host.values import device_values
from tilewise.tile.masks import key_range_of, query_range_of
from tilewise.tile.ranges import Place, Variant, key_range, list_at, partial_at, query_range, tile_at
from tilewise.triton.plan import plan
from tilewise.triton.tiles import FORWARD, Tiles

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter"),
]

NEVER, PARTIAL, FULL = 0, 1, 16
"""What `mark` adds to a tile each time it is computed; any other number is a tile computed twice."""


@triton.jit
def mark(marks, variant, M, N, heads, tiles, across, B_R: tl.constexpr, B_C: tl.constexpr, BY_KEY: tl.constexpr):
    """Marks what one program of the forward (or BY_KEY of dkdv) computes, by the same functions in the same loops."""
    program = tl.program_id(0)
    t, h, b = program % tiles, program // tiles % heads, program // tiles // heads
    lists = list_at(variant.lists, b, h, t)
    if BY_KEY:
        lo, full_lo, full_hi, hi = query_range(variant, lists, b, t * B_C, M, N, B_R, B_C)
    else:
        place = Place(b, h, 0, t * B_R, M, N, N - M)
        lo, full_lo, full_hi, hi = key_range(variant, lists, place, B_R, B_C)
    for x in range(full_lo, full_hi):
        at = marks + program * across + tile_at(variant.lists, lists, x)
        tl.store(at, tl.load(at) + 16)
    for x in range(full_lo - lo + hi - full_hi):
        at = marks + program * across + partial_at(variant.lists, lists, x, lo, full_lo, full_hi)
        tl.store(at, tl.load(at) + 1)


@triton.jit
def ranges(out, variant, M, N, B_R: tl.constexpr, B_C: tl.constexpr):
    """How many key tiles each program of the forward computes."""
    t = tl.program_id(0)
    lo, _, _, hi = key_range(variant, 0, Place(0, 0, 0, t * B_R, M, N, N - M), B_R, B_C)
    tl.store(out + t, hi - lo)


@triton.jit
def intervals(of_rows, of_keys, mask, M, N, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Marks what lies between the ends of each row's keys, and of each key's rows."""
    b = tl.program_id(0)
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
    at, inside = b * M * N + i * N + j, (i < M) & (j < N)
    lo, hi = key_range_of(mask, b, i + (N - M), N)
    tl.store(of_rows + at, (lo <= j) & (j < hi), mask=inside)
    lo, hi = query_range_of(mask, b, j, M, N - M)
    tl.store(of_keys + at, (lo <= i) & (i < hi), mask=inside)


def describe(mask, B, H, M, N):
    """The problem and the operands of a call with this mask."""
    q, k = torch.zeros(B, M, H, 16), torch.zeros(B, N, H, 16)
    x, recipe, longest = check_arguments(q, k, k, mask, (), None, None, 0.0, None, None, False, "triton")
    return problem_on(x, recipe, longest, "cpu"), x


def computed_tiles(mask, B, H, M, N, tiles, by_key=False):
    """(B, H, query tiles, key tiles): NEVER, PARTIAL or FULL."""
    p, x = describe(mask, B, H, M, N)
    parts, _, _ = device_values(p, x.extra)
    lists, listing = tile_lists(p, plan(p), tiles, parts, x, by_key)
    for one in listing:
        one.run()
    assert bool(listing) == any(not part.interval for part in mask.parts), "lists are for masks that are no intervals"
    of_rows, of_columns = triton.cdiv(M, tiles.B_r), triton.cdiv(N, tiles.B_c)
    count, across = (of_columns, of_rows) if by_key else (of_rows, of_columns)
    marks = torch.zeros(B, H, count, across, dtype=torch.int32)
    mark[(B * H * count,)](marks, Variant(parts, (), None, lists), M, N, H, count, across, tiles.B_r, tiles.B_c, by_key)
    return marks.mT if by_key else marks


def expected(mask, B, H, M, N, tiles):
    """By brute force: tiles with an entry, tiles whose entries are all seen, and tiles inside the rows, the keys."""
    dense = mask.dense(M, N).expand(B, H, M, N)
    of_rows, of_columns = triton.cdiv(M, tiles.B_r), triton.cdiv(N, tiles.B_c)

    def by_tile(entries, beyond):
        padded = torch.full((B, H, of_rows * tiles.B_r, of_columns * tiles.B_c), beyond)
        padded[:, :, :M, :N] = entries
        return padded.reshape(B, H, of_rows, tiles.B_r, of_columns, tiles.B_c)

    some, every = by_tile(dense, False).amax((3, 5)), by_tile(dense, True).amin((3, 5))
    inside_rows = (torch.arange(1, of_rows + 1) * tiles.B_r <= M)[:, None]
    inside_keys = (torch.arange(1, of_columns + 1) * tiles.B_c <= N)[None, :]
    return some, every, inside_rows, inside_keys


def masks(B, H, M, N):
    """One of every kind, and the ends of those that have lengths."""
    generator = torch.Generator().manual_seed(1)
    documents = torch.arange(max(M, N)) // 23

    def sparse(*shape):
        """True in a few places: most tiles have none."""
        return torch.rand(shape, generator=generator) < 0.004

    return {
        "full": tw.Full(),
        "causal": tw.Causal(),
        "window": tw.Window(19, 6),
        "diagonal": tw.Window(0, 0),
        "left": tw.Window(24, None),
        "right": tw.Window(None, 5),
        "prefix": tw.Prefix(torch.tensor([37, 9])),
        "prefix-ends": tw.Prefix(torch.tensor([0, N], dtype=torch.int32)),
        "padding": tw.Padding(torch.tensor([N - 3, 34])),
        "padding-ends": tw.Padding(torch.tensor([0, N], dtype=torch.int32)),
        "padding-bool": tw.Padding(torch.rand(B, N, generator=generator) < 0.05),
        "documents": tw.Documents(documents[:M].repeat(B, 1), (documents[:N] + 1).repeat(B, 1)),
        "dense": tw.Dense(sparse(M, N)),
        "dense-heads": tw.Dense(sparse(B, H, M, N)),
        "dense-rows": tw.Dense(torch.arange(M)[:, None] < 33),
        "empty": tw.Dense(torch.zeros(1, N, dtype=torch.bool)),
    }


SHAPES = {
    "square": (96, 96), "ragged": (75, 101), "more-keys": (40, 130), "more-queries": (117, 50), "one-row": (1, 70),
}  # fmt: skip
NAMES = tuple(masks(2, 2, 1, 1))
CASES = [(shape, (name,)) for shape in SHAPES for name in NAMES]
PAIRED = ("causal", "window", "diagonal", "prefix", "padding", "padding-bool", "documents", "dense-heads")
CASES += [(tuple(SHAPES)[n % 5], pair) for n, pair in enumerate(combinations(PAIRED, 2))]
CASES += [
    ("ragged", ("causal", "window", "padding")),
    ("more-queries", ("prefix", "window", "padding", "documents")),
    ("more-keys", ("causal", "left", "dense-heads", "padding-bool")),
]


INTERVALS = [
    (shape, names) for shape, names in CASES if all(part.interval for n in names for part in masks(2, 2, 1, 1)[n].parts)
]


def make(shape, names):
    """The intersection of the named masks, and its sizes."""
    M, N = SHAPES[shape]
    H = 2 if "dense-heads" in names else 1
    known = masks(2, H, M, N)
    mask = known[names[0]]
    for name in names[1:]:
        mask = mask & known[name]
    return mask, (2, H, M, N)


@pytest.mark.parametrize(
    ("shape", "names"), CASES, ids=lambda given: given if isinstance(given, str) else "&".join(given)
)
def test_a_kernel_computes_the_tiles_with_an_entry_and_no_others(shape, names):
    mask, sizes = make(shape, names)
    tiles = Tiles(16, 32, 4, 1)
    some, every, inside_rows, inside_keys = expected(mask, *sizes, tiles)
    listed = any(not part.interval for part in mask.parts)
    forward, backward = computed_tiles(mask, *sizes, tiles), computed_tiles(mask, *sizes, tiles, by_key=True)
    spare = 1 if "padding" in names and {"window", "diagonal"} & {*names} else 0
    for marks, inside, most in ((forward, inside_keys, 0), (backward, inside_rows, spare)):
        assert set(marks.unique().tolist()) <= {NEVER, PARTIAL, FULL}, "every tile at most once"
        assert not (some & (marks == NEVER)).any(), "computed, if an entry is seen"
        # a tile of keys that ends in padding asks for the rows that a window gives its padded keys, too
        extra = ((marks != NEVER) & ~some).sum(-1)
        assert extra.max() <= most, "computed, only if an entry is seen"
        # a full tile is loaded without bounds along the loop; a list's, along neither side
        whole = inside_rows & inside_keys if listed else inside
        assert torch.equal(marks == FULL, every & some & whole), "full, if and only if every entry is seen"
    if not spare:
        assert torch.equal(forward != NEVER, backward != NEVER), "the backward computes the transpose"


@pytest.mark.parametrize(
    ("shape", "names"), INTERVALS, ids=lambda given: given if isinstance(given, str) else "&".join(given)
)
def test_an_interval_holds_what_is_seen_and_nothing_else(shape, names):
    mask, (B, H, M, N) = make(shape, names)
    p, x = describe(mask, B, H, M, N)
    parts, _, _ = device_values(p, x.extra)
    of_rows, of_keys = torch.zeros(2, B, M, N, dtype=torch.bool)
    intervals[(B,)](of_rows, of_keys, parts, M, N, triton.next_power_of_2(M), triton.next_power_of_2(N))
    dense = mask.dense(M, N).expand(B, H, M, N)[:, 0]
    assert torch.equal(of_rows, dense)
    assert torch.equal(of_keys, dense)


def test_the_tiles_of_a_mask_add_up_to_it():
    mask, (B, H, M, N) = make("ragged", ("causal", "window"))
    tiles = Tiles(16, 16, 4, 1)
    marks = computed_tiles(mask, B, H, M, N, tiles)
    rows, columns = torch.arange(M) // tiles.B_r, torch.arange(N) // tiles.B_c
    of_entry = marks[:, :, rows[:, None], columns[None, :]]
    dense = mask.dense(M, N).expand(B, H, M, N)
    assert dense.any()
    assert torch.equal((of_entry == FULL) | ((of_entry == PARTIAL) & dense), dense)


@pytest.mark.parametrize("tiles", [FORWARD["hopper", 2, 64], FORWARD["hopper", 2, 128]], ids=str)
def test_a_window_of_1k_in_16k_tokens_costs_a_seventh_of_causal(tiles):
    S = 16384
    count = triton.cdiv(S, tiles.B_r)

    def cost(mask):
        p, x = describe(mask, 1, 1, S, S)
        parts, _, _ = device_values(p, x.extra)
        out = torch.zeros(count, dtype=torch.int32)
        ranges[(count,)](out, Variant(parts, (), None, None), S, S, tiles.B_r, tiles.B_c)
        return int(out.sum())

    full, causal, window = cost(tw.Full()), cost(tw.Causal()), cost(tw.Causal() & tw.Window(1023, 0))
    assert full == count * S // tiles.B_c
    assert 0.5 <= causal / full < 0.51
    assert 1 / 8.3 < window / causal < 1 / 7


def test_documents_cost_their_own_squares():
    """Four documents of 64 tokens: a quarter of the tiles, all of them full."""
    ids = (torch.arange(256) // 64).repeat(1, 1)
    marks = computed_tiles(tw.Documents(ids, ids), 1, 1, 256, 256, Tiles(32, 32, 4, 1))
    squares = torch.block_diag(*[torch.ones(2, 2, dtype=torch.int32)] * 4)
    assert torch.equal(marks[0, 0], squares * FULL)
    marks = computed_tiles(tw.Documents(ids, ids) & tw.Causal(), 1, 1, 256, 256, Tiles(32, 32, 4, 1))
    below = torch.block_diag(*[torch.tensor([[PARTIAL, NEVER], [FULL, PARTIAL]], dtype=torch.int32)] * 4)
    assert torch.equal(marks[0, 0], below)


def test_lists_are_shared_where_the_mask_does_not_differ():
    """One list for all batch entries and heads of a mask without either: memory linear in the number of tiles."""
    tiles = Tiles(16, 16, 4, 1)
    for shape in ((1, 1), (2, 1), (1, 3), (2, 3)):
        p, x = describe(tw.Dense(torch.ones(*shape, 64, 64, dtype=torch.bool)), 2, 3, 64, 64)
        parts, _, _ = device_values(p, x.extra)
        lists, _ = tile_lists(p, plan(p), tiles, parts, x, by_key=False)
        assert lists.ptr.shape == (*shape, 4, 6)
        assert (lists.batch == odd(0 + 1)) == (shape[0] == 1)
        assert (lists.head == odd(0 + 1)) == (shape[1] == 1)
