"""Hopper's roles for few queries, rehearsed: each key tile of each sequence comes from its pages, once, K before V, or
both at once of latents; and what is loaded before earlier kernels are complete."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hopper import pretend
from hopper.calls import call
from hopper.pretend import INSTEAD, NAMES, Box, Numbers, Scalar, World, functions
from hopper.rehearsal import cache_of, variant_of

import tilewise as tw
from tilewise.hopper.split_keys import launch as decode_launch
from tilewise.hopper.split_keys.choice import splits
from tilewise.hopper.split_keys.kernel import EARLY_TILES

LENGTHS, WIDTH, H, H_K = (2500, 3, 0, 513, 64, 65), 2560, 8, 2
GONE = 1 << 30
"""What the table holds where no query needs the page."""


class Lanes:
    """A vector of integers, one a lane."""

    type = SimpleNamespace(layout=None)

    def __init__(self, values):
        self.values = [int(value) for value in values]

    def __add__(self, other):
        return Lanes(value + int(other) for value in self.values)

    def __eq__(self, other):
        return Lanes(value == int(other) for value in self.values)

    __hash__ = None


class Language(pretend.Language):
    """What the loading warp does with a vector of pages."""

    arange = staticmethod(lambda first, end, layout: Numbers() if layout is not None else Lanes(range(first, end)))
    sum = staticmethod(lambda x, _: Scalar(sum(x.values)) if isinstance(x, Lanes) else Numbers())
    num_warps = staticmethod(lambda: 4)

    @staticmethod
    def where(c, a, b):
        if isinstance(c, Lanes):
            return Lanes(x if chosen else b for chosen, x in zip(c.values, a.values, strict=True))
        return pretend.Language.where(c, a, b)


def line_of_call(p, W):
    """The first place and the places of each sequence, and the pieces of programs, as tile/line.py divides them."""
    places = [max(1, -(-n // decode_launch.plan(p).split.B_C)) for n in LENGTHS]
    ends = torch.tensor(places).cumsum(0).tolist()
    programs = max(1, min(W, ends[-1]))
    pieces = [(w * ends[-1] // programs, (w + 1) * ends[-1] // programs) for w in range(programs)]
    return ends, places, pieces + [(0, 0)] * (W - programs)


def paged(page):
    """Return a table of shuffled pages, and each page's sequence and number in it."""
    width = WIDTH // page
    table = torch.randperm(len(LENGTHS) * width, generator=torch.Generator().manual_seed(0)).view(-1, width).int()
    place_of = {int(entry): divmod(n, width) for n, entry in enumerate(table.flatten())}
    for b, n in enumerate(LENGTHS):
        table[b, -(-n // page) :] = GONE
    return table, place_of


def rehearsed(D, page, M, W, mask, monkeypatch, written_late=None, index=None):
    """What happens in the roles of a call, and where its pages and places are. The table may be `written_late`: before
    earlier kernels are complete, all its entries are that number."""
    table, place_of = paged(page) if page else (None, {})
    before = table if written_late is None else torch.full_like(table, written_late)
    waited = set()  # roles
    B = len(LENGTHS)
    keys = (B * WIDTH // page, page) if page else (B, WIDTH)
    layout = tw.Cached(torch.tensor(LENGTHS), table, index=index)
    of_v = {"D_v": min(D, 512), "within": D > 128}
    p, x = call(M, 0, D, H, H_K, batch=(B,), keys=keys, mask=mask, layout=layout, backend="hopper", **of_v)
    assert splits(p)
    split = decode_launch.plan(p).split
    ends, places, pieces = line_of_call(p, W)

    def own_piece(batch, variant, H_k, programs, split):
        n = pretend.world.here.role[0]
        first, stop = pieces[n // H_K]
        return SimpleNamespace(total=Scalar(ends[-1])), Scalar(n % H_K), Scalar(n // H_K), Scalar(first), Scalar(stop)

    def find(_, at):
        b = next(b for b, end in enumerate(ends) if end > int(at))
        return Scalar(b), Scalar(0), Scalar(int(at) - ends[b] + places[b]), Scalar(places[b])

    def pages_from(batch, work, row, SIZE, P):
        rows = [int(row) + lane * SIZE for lane in range(32)]
        if P == 0:
            return Lanes(rows)
        now = table if pretend.world.here.role in waited else before
        return Lanes(now[int(work.b), r // P] if r < int(work.last) else -1 for r in rows)

    def load(box, at, *given):
        place = box.name, *map(int, at)
        pretend.world.record("loaded" if pretend.world.here.role in waited else "loaded early", place)
        pretend.load(box, at, *given)

    def multiply(left, right, *_, **__):
        pretend.world.record("multiplied", left.cell.content)
        return Numbers()

    done = lambda *given: pretend.world.record("stored")  # noqa: E731
    pair = lambda *_: (Numbers(), Numbers())  # noqa: E731
    instead = {
        "own_piece": own_piece, "pages_from": pages_from, "warpgroup_mma": multiply, "gl": Language(),
        "triton_compat": SimpleNamespace(**vars(NAMES["triton_compat"]) | {"load": load}),
        "wait_dependencies": lambda: waited.add(pretend.world.here.role),
        "places_of": lambda *_: (Numbers(), Numbers(), Numbers()), "address": lambda *_: Numbers(),
        "visible": lambda *_: Numbers(), "apply_scores": lambda *_: Numbers(), "zero_outside": lambda *_: None,
        "online": lambda S, o, *_: (Numbers(), o, *pair()), "totals": pair, "flags_of_warps": Numbers,
        "sums_of_threads": lambda _: Numbers(), "write": done, "store_partial": done,
    }  # fmt: skip
    monkeypatch.setitem(INSTEAD, "tilewise.hopper.split_keys.kernel", instead)
    monkeypatch.setitem(INSTEAD, "tilewise.tile.line", {"find": find})
    functions.cache_clear()
    kernel = functions("tilewise.hopper.split_keys.kernel")["attention_decode"]
    size = decode_launch.plan(p).boxes[0].block_shape
    k, v = (Box(name, 2 * size[2] * size[3], size) for name in "kv")
    world = pretend.world = World(W * H_K)
    variant = variant_of(p, x, None)._replace(sink=None)
    panels = decode_launch.plan(p).panels
    results, of_call = (Numbers(), Numbers(), Numbers()), (cache_of(p, x), variant, 1.0, H_K, W, split, panels)
    arguments = Numbers(), k, None if panels.shared else v, *results, *of_call
    world.run([((n,), lambda: kernel(*arguments)) for n in range(world.programs)])
    functions.cache_clear()
    if world.failure:
        raise world.failure
    return world.events, place_of, split, pieces, ends, places


def told(events, page, place_of):
    """Of each sequence, key head and operand the programs that multiply it, and the first keys and columns of what they
    multiply, in order; and how often each program stores."""
    seen, stored = defaultdict(list), defaultdict(int)
    for what, role, *given in events:
        if what == "stored":
            stored[role[0]] += 1
        if what != "multiplied":
            continue
        names, tiles = set(), set()
        for (row, panel), (name, entry, h, at, column) in given[0][1:]:
            names.add(name)
            if not page or 0 <= entry < GONE:  # TMA reads zeros elsewhere
                b, number = place_of[entry] if page else (entry, 0)
                tiles.add((b, h, number * page + at - row, column - 64 * panel))
        (name,), ((b, h, j, first),) = names, tiles
        seen[b, h, name].append((role[0] // H_K, j, first))
    return seen, stored


@pytest.mark.parametrize("mask", [tw.Full(), tw.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize(("D", "page"), [(128, 64), (128, 16), (64, 128), (64, 8), (128, 0)])
@pytest.mark.parametrize(("M", "W"), [(1, 3), (4, 1), (2, 40)])
def test_each_tile_is_multiplied_once_in_order(monkeypatch, mask, D, page, M, W):
    events, place_of, split, pieces, ends, places = rehearsed(D, page, M, W, mask, monkeypatch)
    seen, stored = told(events, page, place_of)
    for b, n in enumerate(LENGTHS):
        tiles = [j * split.B_C for j in range(-(-n // split.B_C))]
        for h in range(H_K):
            of_k, of_v = seen[b, h, "k"], seen[b, h, "v"]
            assert [(j, first) for _, j, first in sorted(of_k)] == [(j, 0) for j in tiles]
            assert sorted(of_k) == sorted(of_v)
            for w in range(W):
                assert [j for who, j, _ in of_k if who == w] == sorted(j for who, j, _ in of_k if who == w)
    for w, (first, stop) in enumerate(pieces):
        of_rows = sum(first < end and stop > end - own for end, own in zip(ends, places, strict=True))
        assert [stored[w * H_K + h] for h in range(H_K)] == [of_rows if stop > first else 0] * H_K


@pytest.mark.parametrize(("D", "of_k", "of_v"), [(576, 6, 5), (512, 6, 5), (320, 4, 3)])
@pytest.mark.parametrize("page", [64, 16, 0])
@pytest.mark.parametrize(("M", "W"), [(1, 3), (8, 40)])
def test_latents_are_loaded_once_and_multiplied_twice(monkeypatch, D, of_k, of_v, page, M, W):
    """S takes all pieces of a tile, and O those of V's columns. 40 programs leave some without work."""
    events, place_of, split, *_ = rehearsed(D, page, M, W, tw.Causal(), monkeypatch)
    seen, _ = told(events, page, place_of)
    columns = [0, 128, 192, 320, 384, 512]
    for b, n in enumerate(LENGTHS):
        for h in range(H_K):
            found = [(j, first) for _, j, first in sorted(seen[b, h, "k"], key=lambda one: one[:2])]
            once = columns[:of_k] + columns[:of_v]
            assert found == [(j, first) for j in range(0, n, split.B_C) for first in once]
    loaded = [box for boxes in by_program(events, "loaded").values() for box in boxes if not page or box[1] in place_of]
    assert loaded
    assert len(loaded) == len(set(loaded))


def by_program(events, kind):
    """What each program loads or multiplies, in order."""
    found = defaultdict(list)
    for what, role, *given in events:
        if what == kind:
            found[role[0]].append(given[0])
    return found


@pytest.mark.parametrize(("D", "page"), [(128, 64), (128, 16), (64, 128), (64, 8), (128, 0), (72, 64)])
@pytest.mark.parametrize("W", [1, 3, 40])
def test_the_first_tiles_are_loaded_early_and_again(monkeypatch, D, page, W):
    events, _, split, pieces, ends, _ = rehearsed(D, page, 1, W, tw.Causal(), monkeypatch)
    early, later = (by_program(events, when) for when in ("loaded early", "loaded"))
    boxes = split.B_C // min(page or split.B_C, split.B_C) * (2 if D > 64 else 1)
    tile = 2 * boxes  # of K and of V
    for w, (first, stop) in enumerate(pieces):
        b, end = next((b, end) for b, end in enumerate(ends) if end > first)
        count = tile * min(EARLY_TILES.value, stop - first, end - first if LENGTHS[b] else 0)
        for n in (w * H_K, w * H_K + 1):
            assert len(early[n]) == EARLY_TILES.value * tile
            assert early[n][:count] == later[n][:count]


@pytest.mark.parametrize("entry", [-1, GONE, -GONE])
def test_a_table_that_is_written_late_changes_no_product(monkeypatch, entry):
    """Before earlier kernels are complete a table may hold anything: what is loaded then is dropped."""
    usual, late = (rehearsed(128, 64, 1, 3, tw.Causal(), monkeypatch, then)[0] for then in (None, entry))
    assert {place[1] for boxes in by_program(late, "loaded early").values() for place in boxes} <= {entry, -1}
    assert by_program(late, "multiplied") == by_program(usual, "multiplied")


def test_nothing_is_loaded_early_by_an_index(monkeypatch):
    """It may be written late as well, and says where the table is read."""
    events, *_ = rehearsed(128, 64, 1, 3, tw.Causal(), monkeypatch, index=torch.arange(len(LENGTHS)))
    assert not by_program(events, "loaded early")
