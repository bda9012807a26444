"""Hopper's roles for few queries, rehearsed: each key tile of each sequence comes from its pages, once, K before V; and
what is asked for before earlier kernels are complete."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hopper import pretend
from hopper.calls import call
from hopper.pretend import INSTEAD, OPERATORS, Box, Numbers, Scalar, World, functions, plain
from hopper.rehearsal import cache_of, variant_of

import tilewise as tw
from tilewise.hopper import decode_launch
from tilewise.hopper.forward.decode import PREFETCHED
from tilewise.hopper.tiles import padded
from tilewise.tile.rows import Rows

LENGTHS, WIDTH, H, H_K = (2500, 3, 0, 513, 64, 65), 2560, 8, 2
GONE = 1 << 30
"""What the table holds where no query needs the page."""
OF_K, OF_V = (Rows(Scalar(first), 1 << 40, 1 << 16, 1 << 8) for first in (0, 1 << 80))


class Lanes(Scalar):
    """A vector of integers or truths."""

    type = SimpleNamespace(layout=None)

    def __init__(self, values):
        self.value = [plain(value) for value in values]


def give_operators(name, function):
    """One operator of vectors with each other, and with a number."""

    def others(self, other):
        return other.value if isinstance(other, Lanes) else [plain(other)] * len(self.value)

    def left(self, other):
        return Lanes(map(function, self.value, others(self, other)))

    def right(self, other):
        return Lanes(map(function, others(self, other), self.value))

    for turned, method in (("", left), ("r", right)):
        setattr(Lanes, f"__{turned}{name}__", method)


for _name, _function in OPERATORS.items():
    give_operators(_name, _function)


class Language(pretend.Language):
    """What the loading warp does with vectors, one number a lane."""

    BlockedLayout = staticmethod(lambda size, *_: None if size == [1] else Numbers())
    arange = staticmethod(lambda first, end, layout: Numbers() if layout is not None else Lanes(range(first, end)))
    sum = staticmethod(lambda x, _: Scalar(sum(x.value)) if isinstance(x, Lanes) else Numbers())
    num_warps = staticmethod(lambda: 4)

    def __init__(self, table=None):
        self.table = table

    @staticmethod
    def where(c, a, b):
        if isinstance(c, Lanes):
            return Lanes(x if chosen else b for chosen, x in zip(c.value, a.value, strict=True))
        return pretend.Language.where(c, a, b)

    def load(self, at, *given, mask=True, other=None, **options):
        if isinstance(at, Lanes):
            entries = self.table.flatten().tolist()
            return Lanes(entries[n] if there else other for n, there in zip(at.value, mask.value, strict=True))
        return pretend.Language.load(at, *given, mask=mask, other=other, **options)


def prefetch(ptr, seen):
    """What lies where a kernel asks for a line: its operand, page or entry, head, row and column."""
    for at, there in zip(ptr.value, seen.value, strict=True):
        if there:
            place = at % (1 << 80)
            row, head, column = (place >> 16) % (1 << 24), (place >> 8) & 255, place & 255
            pretend.world.record("prefetched", "kv"[at >> 80], place >> 40, head, row, column)


def line_of_call(p, W):
    """The first place and the places of each sequence, and the pieces of programs, as tile/line.py divides them."""
    places = [max(1, -(-n // decode_launch.plan(p).split.B_C)) for n in LENGTHS]
    ends = torch.tensor(places).cumsum(0).tolist()
    programs = max(1, min(W, ends[-1]))
    firsts = [w * ends[-1] // programs for w in range(W + 1)]
    return ends, places, [(firsts[w], firsts[w + (w < programs)]) for w in range(W)]


def paged(page):
    """Return a table of shuffled pages, and each page's sequence and number in it."""
    width = WIDTH // page
    table = torch.randperm(len(LENGTHS) * width, generator=torch.Generator().manual_seed(0)).view(-1, width).int()
    place_of = {int(entry): divmod(n, width) for n, entry in enumerate(table.flatten())}
    for b, n in enumerate(LENGTHS):
        table[b, -(-n // page) :] = GONE
    return table, place_of


def rehearsed(D, page, M, W, mask, monkeypatch, early=None, index=None):
    """What happens in the roles of a call, and where its pages and places are. `early` changes what the table holds
    before earlier kernels are complete."""
    table, place_of = paged(page) if page else (None, {})
    before = table if early is None else early(table)
    B = len(LENGTHS)
    keys = (B * WIDTH // page, page) if page else (B, WIDTH)
    layout = tw.Cached(torch.tensor(LENGTHS), table, index=index)
    p, x = call(M, 0, D, H, H_K, batch=(B,), keys=keys, mask=mask, layout=layout, backend="hopper")
    assert decode_launch.splits(p)
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
        return Lanes(table[int(work.b), r // P] if r < int(work.last) else -1 for r in rows)

    def multiply(left, right, *_, **__):
        pretend.world.record("multiplied", left.cell.content)
        return Numbers()

    done = lambda *given: pretend.world.record("stored")  # noqa: E731
    pair = lambda *_: (Numbers(), Numbers())  # noqa: E731
    instead = {
        "own_piece": own_piece, "pages_from": pages_from, "warpgroup_mma": multiply, "gl": Language(before),
        "prefetch": prefetch,
        "places_of": lambda *_: (Numbers(), Numbers(), Numbers()), "address": lambda *_: Numbers(),
        "visible": lambda *_: Numbers(), "apply_scores": lambda *_: Numbers(), "row_max": pair,
        "rescaling": lambda *_: Numbers(), "write": done, "store_partial": done, "zero_outside": lambda *_: None,
    }  # fmt: skip
    monkeypatch.setitem(INSTEAD, "tilewise.hopper.forward.decode", instead)
    monkeypatch.setitem(INSTEAD, "tilewise.tile.line", {"find": find})
    functions.cache_clear()
    kernel = functions("tilewise.hopper.forward.decode")["attention_decode"]
    size = decode_launch.plan(p).boxes[0].block_shape
    k, v = (Box(name, 2 * size[2] * size[3], size) for name in "kv")
    k.shape = [keys[0], H_K, keys[1], D]
    cache = cache_of(p, x)
    cache = cache._replace(table=Scalar(0) if page else None)
    world = pretend.world = World(W * H_K)
    variant = variant_of(p, x, None)._replace(sink=None)
    arguments = Numbers(), k, v, OF_K, OF_V, Numbers(), Numbers(), Numbers(), cache, variant, 1.0, H_K, W, split
    world.run([((n,), lambda: kernel(*arguments, padded(p))) for n in range(world.programs)])
    functions.cache_clear()
    if world.failure:
        raise world.failure
    return world.events, place_of, split, pieces, ends, places


def told(events, page, place_of):
    """Of each sequence, key head and operand the programs that multiply it and the first keys of their tiles, in order;
    and how often each program stores."""
    seen, stored = defaultdict(list), defaultdict(int)
    for what, role, *given in events:
        if what == "stored":
            stored[role[0]] += 1
        if what != "multiplied":
            continue
        names, tiles = set(), set()
        for (row, panel), (name, entry, h, at, column) in given[0][1:]:
            assert column == 64 * panel
            names.add(name)
            if not page or 0 <= entry < GONE:  # TMA reads zeros elsewhere
                b, number = place_of[entry] if page else (entry, 0)
                tiles.add((b, h, number * page + at - row))
        (name,), ((b, h, j),) = names, tiles
        seen[b, h, name].append((role[0] // H_K, j))
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
            assert [j for _, j in sorted(of_k)] == tiles
            assert sorted(of_k) == sorted(of_v)
            for w in range(W):
                assert [j for who, j in of_k if who == w] == sorted(j for who, j in of_k if who == w)
    for w, (first, stop) in enumerate(pieces):
        of_rows = sum(first < end and stop > end - own for end, own in zip(ends, places, strict=True))
        assert [stored[w * H_K + h] for h in range(H_K)] == [of_rows if stop > first else 0] * H_K


@pytest.mark.parametrize(("D", "page"), [(128, 64), (128, 16), (64, 128), (64, 8), (128, 0), (72, 64)])
@pytest.mark.parametrize("W", [1, 3, 40])
def test_the_first_tiles_are_asked_for(monkeypatch, D, page, W):
    events, place_of, split, pieces, ends, places = rehearsed(D, page, 1, W, tw.Causal(), monkeypatch)
    asked = defaultdict(set)
    for what, role, *given in events:
        if what == "prefetched":
            name, entry, h, row, column = given
            assert h == role[0] % H_K
            b, number = place_of[entry] if page else (entry, 0)
            asked[role[0], name].add((b, number * page + row, column))
    for w, (first, stop) in enumerate(pieces):
        b = next(b for b, end in enumerate(ends) if end > first or end == ends[-1])
        j = (first - ends[b] + places[b]) * split.B_C
        count = min(PREFETCHED.value, stop - first, ends[b] - first) * split.B_C
        rows = range(j, min(j + count, LENGTHS[b])) if stop > first else ()
        lines = {(b, row, column) for row in rows for column in range(0, D, 64)}
        for h in range(H_K):
            assert asked[w * H_K + h, "k"] == asked[w * H_K + h, "v"] == lines


@pytest.mark.parametrize("entry", [-1, GONE, -GONE])
def test_no_address_outside_the_cache_is_asked_for(monkeypatch, entry):
    """Before earlier kernels are complete a table may hold anything."""
    events, *_ = rehearsed(128, 64, 1, 3, tw.Causal(), monkeypatch, lambda table: torch.full_like(table, entry))
    assert {what for what, *_ in events} == {"multiplied", "stored"}


def test_nothing_is_asked_for_by_an_index(monkeypatch):
    index = torch.arange(len(LENGTHS))
    events, *_ = rehearsed(128, 64, 1, 3, tw.Causal(), monkeypatch, index=index)
    assert {what for what, *_ in events} == {"multiplied", "stored"}
