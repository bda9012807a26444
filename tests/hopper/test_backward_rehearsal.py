"""The backward's roles, rehearsed: every tile is multiplied once, masked where it must be, and nobody waits forever."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
from hopper.calls import call
from hopper.rehearsal import Rehearsal, rehearse_backward
from hopper.scenes import ENDS, MASKS, H, blocks, packed

import tilewise as tw
from tilewise.hopper import by_gradient
from tilewise.hopper.backward.kernel_by_gradient import Tile as GradientTile
from tilewise.hopper.counts import width_of_box


def rehearsed(M, N, D, H_k, mask, programs=3, section=2, **given):
    """The kernel's constants, and what goes wrong, held against the mask written out."""
    seen = mask.dense(M, N).reshape(-1, M, N).expand(H, M, N)
    found = rehearse_backward(*call(M, N, D, H, H_k, batch=(1,), mask=mask, **given), seen, programs, section)
    return found.tile, list(faults(found, H_k, [(0, 0, seen)]))


def laid_out(found: Rehearsal, H_k, sequences):
    """The mask of every query tile and 64 keys, (h, i, j); the number of every query tile, (h, i), and what key tile a
    number is, (h_k, j), in the order of scratch. `sequences`: the first query, the first key and the mask of each."""
    tile, shape, packed = found.tile, found.shape, len(sequences) > 1
    masks, numbers, keys = {}, {}, {}
    for b, (q0, k0, seen) in enumerate(sequences):
        _, M, N = seen.shape
        for h in range(H):
            for i in range(0, M, tile.B_R):
                numbers[h, q0 + i] = h * shape.blocks + (q0 // tile.B_R + b) * packed + i // tile.B_R
                for j in range(0, N, 64):
                    masks[h, q0 + i, k0 + j] = seen[h, i : i + tile.B_R, j : j + 64]
        for h in range(H_k):
            for t in range(-(-N // tile.B_C)):
                keys[h * shape.key_tiles + (k0 // tile.B_C + b) * packed + t] = h, k0 + t * tile.B_C
    return masks, numbers, keys


def faults(found: Rehearsal, H_k, sequences) -> Iterator[str]:
    """What goes wrong."""
    tile = found.tile
    masks, numbers, keys = laid_out(found, H_k, sequences)
    read = Reader(sequences, tile, keys, {number: where for where, number in numbers.items()})
    for what, _, *event in found.events:
        if what != "weighed":
            getattr(read, what)(*event)
    if not read.fp32 and read.placed != read.products:
        yield "the softmax is elsewhere than its products"
    both = tile.B_C // 64 == 1 and read.fp32  # each group has separate columns
    for where, part in masks.items():
        if read.products[where] != 1 + both and (read.products[where] or part.any()):
            yield f"{where} is multiplied {read.products[where]} times"
    for where in read.products - read.asked:
        if where not in masks or not masks[where].all() or masks[where].shape != (tile.B_R, 64):
            yield f"{where} needs the mask"
    yield from (f"query head {h} meets key head {h_k}" for h, h_k in read.pairs if h * H_k // H != h_k)
    if isinstance(tile, GradientTile):
        yield from faults_of_dq(read, masks, numbers)
    loops = Counter((h, i) for h, i, _ in read.lists)
    pieces = tile.D * tile.B_R // read.block // 256
    for where, number in numbers.items() if not isinstance(tile, GradientTile) else ():
        for piece in range(pieces):  # of a single one, both groups add their part
            if read.adds[number * pieces + piece] != loops[where] * (2 if pieces == 1 else 1):
                yield f"dQ of {where} gets {read.adds[number * pieces + piece]} pieces {piece}"
    rows = {k0 + j for _, k0, seen in sequences for j in range(0, seen.shape[2], 64)}
    halves = isinstance(tile, GradientTile)
    for box in ((g, h, row) for g in ("dk", "dv") for h in range(H_k) for row in rows):
        if read.boxes[box] != 1 + both:
            yield f"{box} is stored {read.boxes[box]} times"
        size = tile.D if read.fp32 or box[0] == "dk" else tile.D_V
        step = min(128, width_of_box(size)) if halves else width_of_box(size)
        if read.columns[box] != set(range(0, size, step)):
            yield f"{box} is stored from columns {read.columns[box]} on"


def faults_of_dq(read, masks, numbers) -> Iterator[str]:
    """What goes wrong with dQ = dS K."""
    for where, part in masks.items():
        if read.summed[where] != 1 and (read.summed[where] or part.any()):
            yield f"dS of {where} is multiplied {read.summed[where]} times"
    columns = set(range(0, read.tile.D, min(128, width_of_box(read.tile.D))))
    for h, row in numbers:
        if read.boxes["dq", h, row] != 1 or read.columns["dq", h, row] != columns:
            yield f"dQ of {h, row} is stored {read.boxes['dq', h, row]} times"


def first_box(content):
    """What TMA loaded first into a piece of a tile."""
    return content[1][1] if content[0] == "parts" else content


class Reader:
    """Events, as where they are among all queries and all keys: (h, i, j) of a query tile and 64 keys."""

    def __init__(self, sequences, tile, keys, queries):
        self.sequences, self.tile, self.keys, self.queries = sequences, tile, keys, queries
        self.fp32 = hasattr(tile, "PIECES")
        self.block = 8 if tile.D % 64 else 16
        """Rows of a box of dQ's sums."""
        self.products, self.placed, self.asked, self.adds, self.boxes, self.summed = (Counter() for _ in range(6))
        self.lists, self.pairs, self.columns = set(), set(), defaultdict(set)

    def product(self, left, row, right):
        """Of K and Q, or of dS and K; of their pieces the first alone counts."""
        if left[0] == "ds":
            (_, *whose), (_, _, h_k, row, column) = left, first_box(right)
            if whose != ["zeros"] and not column:
                b, h, i, j = whose
                q0, k0, _ = self.sequences[b]
                assert k0 + j == row, "dS of other keys"
                self.summed[h, q0 + i, row] += 1
                self.pairs.add((h, h_k))
            return
        if first_box(left)[0] != "k" or (self.fp32 and (left[1] or right[1])):
            return
        if self.fp32:
            number = left[2] // self.tile.B_C
            h_k, j = self.keys[number]
            row = left[2] % self.tile.B_C
            h, i = self.queries[right[2] // self.tile.B_R]
        else:
            (_, _, h_k, j, column), (_, _, h, i, other) = first_box(left), first_box(right)
            assert column == other, "other columns of Q than of K"
            if column:
                return
            number = j
        self.products[h, i, j + row] += 1
        self.lists.add((h, i, number))
        self.pairs.add((h, h_k))

    def weights(self, b, h, i, j, edge):
        """The softmax, and whether it is asked for the mask; in fp32 only where it is."""
        q0, k0, _ = self.sequences[b]
        self.placed[h, q0 + i, k0 + j] += 1
        self.asked[h, q0 + i, k0 + j] += edge

    def added(self, row):
        """A piece of dQ."""
        self.adds[row // self.block] += 1

    def stored(self, name, _, h_k, row, column):
        """Rows of dK or dV."""
        self.boxes[name, h_k, row] += column == 0
        self.columns[name, h_k, row].add(column)


@pytest.mark.parametrize("H_k", [8, 2, 1])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_every_tile_is_multiplied_once(mask, D, H_k):
    _, wrong = rehearsed(512, 512, D, H_k, MASKS[mask])
    assert not wrong


PIECES = {
    (192, 128): (192, 128), (184, 120): (192, 128), (176, 176): (192, 192), (96, 96): (96, 96), (72, 80): (96, 96),
    (160, 160): (160, 160), (224, 216): (256, 256),
}  # fmt: skip
"""Head sizes, and the columns of their rows in shared memory."""


@pytest.mark.parametrize("H_k", [8, 2, 1])
@pytest.mark.parametrize("sizes", [*PIECES], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "blocks"])
def test_head_sizes_in_pieces(mask, sizes, H_k):
    D, D_v = sizes
    for given in ({}, {"deterministic": mask != "blocks"}, {"dropout": 0.1}, {"out_dtype": torch.float32}):
        tile, wrong = rehearsed(512, 512, D, H_k, MASKS[mask], D_v=D_v, backend="hopper", **given)
        assert not wrong
        assert (tile.D, tile.D_V) == PIECES[sizes]


@pytest.mark.parametrize("sizes", [(192, 128), (96, 96), (160, 160), (224, 224)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_packed_sequences_in_pieces(mask, sizes):
    layout, sequences = packed(MASKS[mask])
    last, (D, D_v) = int(ENDS[-1]), sizes
    p, x = call(last, last, D, H, 2, batch=(), mask=MASKS[mask], layout=layout, D_v=D_v, backend="hopper")
    assert not list(faults(rehearse_backward(p, x, torch.empty(0), 3, 1), 2, sequences))


@pytest.mark.parametrize("H_k", [8, 1])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize(
    "given",
    [
        {"deterministic": True},
        {"dropout": 0.1},
        {"score": tw.SoftCap(50.0)},
        {"out_dtype": torch.float32},
        {"score": tw.Bias(torch.zeros(1, 1, 512, 512))},
    ],
    ids=str,
)
def test_with_more_asked_for(given, mask, D, H_k):
    _, wrong = rehearsed(512, 512, D, H_k, MASKS[mask], **given)
    assert not wrong


@pytest.mark.parametrize("H_k", [8, 1])
@pytest.mark.parametrize("mask", ["causal", "window", "blocks"])
@pytest.mark.parametrize("precision", ["fp16x3", "bf16x6"])
@pytest.mark.parametrize("D", [64, 128])
def test_in_fp32(D, precision, mask, H_k):
    shown = tw.Dense(blocks(512, 512)[..., :500]) if mask == "blocks" else MASKS[mask]
    for deterministic in (False,) if mask == "blocks" else (False, True):  # lists have no order
        given = {"dtype": torch.float32, "precision": precision, "deterministic": deterministic}
        _, wrong = rehearsed(512, 500, D, H_k, shown, **given)
        assert not wrong


@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize(("M", "N"), [(300, 700), (700, 300), (65, 129), (1, 500)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ragged_lengths(mask, M, N, programs):
    _, wrong = rehearsed(M, N, 128, 2, MASKS[mask], programs)
    assert not wrong


@pytest.mark.parametrize("H_k", [8, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_programs_take_tiles_of_several_sections(mask, D, H_k):
    _, wrong = rehearsed(384, 512, D, H_k, MASKS[mask], programs=13, section=1)
    assert not wrong


@pytest.mark.parametrize("H_k", [8, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_packed_sequences(mask, D, H_k):
    layout, sequences = packed(MASKS[mask])
    last = int(ENDS[-1])
    p, x = call(last, last, D, H, H_k, batch=(), mask=MASKS[mask], layout=layout)
    assert not list(faults(rehearse_backward(p, x, torch.empty(0), 3, 1), H_k, sequences))


def test_loops_share_keys():
    tile, wrong = rehearsed(2560, 512, 128, 1, tw.Causal(), section=3)
    assert tile.GQA_PROGRAMS > 1
    assert not wrong


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize("H_k", [8, 1])
@pytest.mark.parametrize("D", [160, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_loops_of_several_chunks(mask, D, H_k, programs, monkeypatch):
    monkeypatch.setattr(by_gradient, "MOST_TILES", 3)
    p, x = call(512, 512, D, H, H_k, batch=(1,), mask=MASKS[mask], backend="hopper")
    seen = MASKS[mask].dense(512, 512).reshape(-1, 512, 512).expand(H, 512, 512)
    found = rehearse_backward(p, x, seen, programs, 1)
    assert found.shape.chunks == 3
    assert not list(faults(found, H_k, [(0, 0, seen)]))


@pytest.mark.parametrize("H_k", [8, 2])
@pytest.mark.parametrize("D", [192, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_packed_sequences_of_several_chunks(mask, D, H_k, monkeypatch):
    monkeypatch.setattr(by_gradient, "MOST_TILES", 3)
    layout, sequences = packed(MASKS[mask])
    p, x = call(int(ENDS[-1]), int(ENDS[-1]), D, H, H_k, batch=(), mask=MASKS[mask], layout=layout, backend="hopper")
    found = rehearse_backward(p, x, torch.empty(0), 5, 1)
    assert found.shape.chunks > 3
    assert not list(faults(found, H_k, sequences))


@pytest.mark.parametrize(("M", "N"), [(300, 700), (700, 300), (65, 129), (1, 500), (449, 449)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ragged_lengths_by_gradient(mask, M, N):
    _, wrong = rehearsed(M, N, 256, 2, MASKS[mask], 4)
    assert not wrong


@pytest.mark.parametrize("mask", [tw.Causal(), tw.Window(150, 30)], ids=str)
def test_a_function_may_show_more_queries_a_key_than_keys_a_query(mask):
    behind = tw.Mask.of(lambda b, h, i, j: (j <= i // 4) & (j > i // 4 - 100))
    for shown in (behind, behind & mask):
        _, wrong = rehearsed(1024, 1024, 192, 8, shown)
        assert not wrong
