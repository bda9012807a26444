"""The forward's roles, rehearsed: every tile is multiplied once, masked where it must be, and nobody waits forever."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from hopper.calls import call
from hopper.rehearsal import Rehearsal, rehearse_forward
from hopper.scenes import ENDS, MASKS, H, packed

import tilewise as tw
from tilewise.hopper.counts import width_of_box
from tilewise.hopper.parts.pieces import pieces_of


def rehearsed(M, N, D, H_k, mask, programs=3, changed=None, **given):
    """The kernel's constants, and what goes wrong, held against the mask written out."""
    seen = mask.dense(M, N).reshape(-1, M, N).expand(H, M, N)
    found = rehearse_forward(
        *call(M, N, D, H, H_k, batch=(1,), mask=mask, **given), seen, programs, 2, **(changed or {})
    )
    return found.tile, list(faults(found, H_k, [(0, 0, seen)]))


def faults(found: Rehearsal, H_k, sequences, reader=None) -> Iterator[str]:
    """What goes wrong. `sequences`: the first query, the first key and the mask of each."""
    read, B_C = reader or Reader(sequences, found.tile), found.tile.B_C
    for what, role, *event in found.events:
        getattr(read, what)(role, *event)
    columns = pieces_of(found.tile.D_V) * found.tile.V_PARTS
    whole_rows = set(range(0, sum(columns), width_of_box(found.tile.D_V))), {0, *accumulate(columns[:-1])}
    """From which columns on boxes and pieces begin."""
    yield from read.wrong
    if any(read.waiting.values()):
        yield "a product with K has none with V"
    yield from (f"query head {h} meets key head {h_k}" for h, h_k in read.pairs if h * H_k // H != h_k)
    for q0, k0, seen in sequences:
        _, M, N = seen.shape
        for h in range(H):
            for i in range(0, M, 64):
                if read.rows[h, q0 + i] != 1:
                    yield f"rows {q0 + i} of head {h} are stored {read.rows[h, q0 + i]} times"
                if read.stores[h, q0 + i] not in whole_rows:
                    yield f"rows {q0 + i} of head {h} are stored from columns {read.stores[h, q0 + i]} on"
                for j in range(0, N, B_C):
                    where, part = (h, q0 + i, k0 + j), seen[h, i : i + 64, j : j + B_C]
                    if read.products[where] != found.tile.V_PARTS and (read.products[where] or part.any()):
                        yield f"{where} is multiplied {read.products[where]} times"
                    whole = part.all() and part.shape[1] == B_C
                    if read.products[where] and not whole and where not in read.masked:
                        yield f"{where} needs the mask"


class Reader:
    """Events, as where they are among all queries and all keys: (h, i, j) of 64 queries and a tile of keys."""

    def __init__(self, sequences, tile):
        self.sequences, self.tile = sequences, tile
        self.products, self.rows, self.waiting = Counter(), Counter(), defaultdict(list)
        self.masked, self.pairs, self.wrong = set(), set(), []
        self.begun, self.stores = defaultdict(list), defaultdict(set)
        """Columns of K and of V from which on each role has multiplied pieces of a tile."""
        self.part = {}
        """Which part of V's columns each role multiplies."""

    def columns(self, content, pieces, part_of=None):
        """What TMA loaded into a piece of a tile, and the piece's number among `pieces`. A role knows its part of V."""
        parts = content[1:] if content[0] == "parts" else [((0, 0), content)]
        (_, (*tile, first)), *others = parts
        width = pieces[0] if len(pieces) == 1 else min(64, *pieces)
        if [[*tile, first + n * width] for n in range(1, len(parts))] != [[*other] for _, other in others]:
            self.wrong.append(f"a piece holds {parts}")
        starts = [sum(pieces[:n]) for n in range(len(pieces))]
        if part_of is not None:
            self.part[part_of], first = divmod(first, sum(pieces))
        if first not in starts or len(parts) * width != pieces[starts.index(first)]:
            self.wrong.append(f"no piece of {pieces} has {len(parts)} boxes from column {first} on")
            return tile, 0
        return tile, starts.index(first)

    def last(self, role, of, piece, pieces):
        """Whether a product is that of the last of `pieces`; they come in order."""
        begun = self.begun[role, of]
        if piece != len(begun):
            self.wrong.append(f"piece {piece} of {of} comes after {begun}")
        begun.append(piece)
        if len(begun) == len(pieces):
            begun.clear()
            return True
        return False

    def product(self, role, left, _, right):
        """Of Q and K."""
        pieces = pieces_of(self.tile.D // self.tile.K_PIECES) * self.tile.K_PIECES
        ((_, _, h, i), of_q), ((_, _, h_k, j), of_k) = self.columns(left, pieces), self.columns(right, pieces)
        if of_q != of_k:
            self.wrong.append(f"piece {of_q} of Q meets piece {of_k} of K")
        if self.last(role, "K", of_k, pieces):
            self.products[h, i, j] += 1
            self.pairs.add((h, h_k))
            self.waiting[role].append((h_k, j))

    def weighed(self, role, right):
        """Of P and V: of the same keys as the product with K before."""
        if self.tile.PV_BITS == 8:  # transposed, in tiles of 128 keys, and all columns in one piece
            _, _, h_k, j, column = right
            j = j // self.tile.D_V * 128 + column
            halves = (0, 1) if self.tile.PROMOTE == "halves" else (0,)
            last = self.last(role, "V", len(self.begun[role, "V"]), halves)
        else:
            (_, _, h_k, j), piece = self.columns(right, pieces_of(self.tile.D_V), role)
            last = self.last(role, "V", piece, pieces_of(self.tile.D_V))
        if self.waiting[role][:1] != [(h_k, j)] or (last and not self.waiting[role].pop(0)):
            self.wrong.append(f"V of key head {h_k} from key {j} on is another P's")

    def asked(self, _, b, h, i, j):
        """For the mask."""
        q0, k0, _ = self.sequences[b]
        self.masked.add((h, q0 + i, k0 + j))

    def stored(self, role, name, b, h, row, column):
        """Rows of O."""
        if column // self.tile.D_V != self.part.get(role, 0):
            self.wrong.append(f"O is stored from column {column} on, of part {self.part[role]} of V")
        self.rows[h, row] += column == 0
        self.stores[h, row].add(column)


PIECES = {
    (192, 128): (192, 128), (96, 96): (96, 96), (160, 160): (160, 160), (192, 192): (192, 192), (224, 224): (224, 224),
    (72, 80): (96, 96), (184, 120): (192, 128), (176, 176): (192, 192), (200, 136): (256, 256), (72, 64): (128, 128),
    (40, 24): (64, 64),
}  # fmt: skip
"""Head sizes, and the columns of their rows in shared memory."""


@pytest.mark.parametrize("sizes", PIECES, ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window", "blocks"])
@pytest.mark.parametrize(
    "given", [{}, {"dropout": 0.1}, {"score": tw.SoftCap(50.0)}, {"out_dtype": torch.float32}], ids=str
)
def test_head_sizes_in_pieces(sizes, mask, given):
    D, D_v = sizes
    tile, wrong = rehearsed(512, 512, D, 2, MASKS[mask], D_v=D_v, backend="hopper", **given)
    assert not wrong
    assert (tile.D, tile.D_V) == PIECES[sizes]


@pytest.mark.parametrize(("D", "D_v", "parts"), [(512, 512, 2), (264, 320, 2), (320, 128, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", [{}, {"score": tw.SoftCap(50.0)}, {"out_dtype": torch.float32}], ids=str)
def test_parts_of_the_columns_of_values(D, D_v, parts, mask, given):
    tile, wrong = rehearsed(512, 512, D, 2, MASKS[mask], D_v=D_v, backend="hopper", **given)
    assert not wrong
    assert (tile.D, tile.D_V, tile.V_PARTS) == (512, 256, parts)


@pytest.mark.parametrize("sizes", [(192, 128), (96, 96), (224, 224), (512, 512)], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_packed_sequences_in_pieces(mask, sizes):
    layout, sequences = packed(MASKS[mask])
    last = int(ENDS[-1])
    p, x = call(last, last, sizes[0], H, 2, batch=(), mask=MASKS[mask], layout=layout, D_v=sizes[1], backend="hopper")
    assert not list(faults(rehearse_forward(p, x, torch.empty(0), 3, 1), 2, sequences))


@pytest.mark.parametrize("H_k", [8, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_every_tile_is_multiplied_once(mask, D, H_k):
    _, wrong = rehearsed(512, 512, D, H_k, MASKS[mask])
    assert not wrong


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "blocks"])
@pytest.mark.parametrize(
    "given", [{"dropout": 0.1}, {"score": tw.SoftCap(50.0)}, {"out_dtype": torch.float32}], ids=str
)
def test_with_more_asked_for(given, mask, D):
    _, wrong = rehearsed(512, 512, D, 8, MASKS[mask], **given)
    assert not wrong


@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
@pytest.mark.parametrize(("M", "N"), [(300, 700), (700, 300), (65, 129), (1, 500)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ragged_lengths(mask, M, N, D, programs):
    _, wrong = rehearsed(M, N, D, 2, MASKS[mask], programs, backend="hopper")
    assert not wrong


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_packed_sequences(mask, D):
    layout, sequences = packed(MASKS[mask])
    last = int(ENDS[-1])
    p, x = call(last, last, D, H, 2, batch=(), mask=MASKS[mask], layout=layout)
    assert not list(faults(rehearse_forward(p, x, torch.empty(0), 3, 1), 2, sequences))


@pytest.fixture
def hurried():
    """Roles that take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "changed", [{}, {"PINGPONG": True}, {"K_PIECES": 2}, {"K_PIECES": 8, "PINGPONG": True}, {"KV_STAGES": 2}], ids=str
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_keys_come_in_pieces(mask, changed, hurried):
    tile, wrong = rehearsed(768, 768, 512, 2, MASKS[mask], changed=changed, backend="hopper")
    assert not wrong
    assert tile.K_PIECES == changed.get("K_PIECES", 4)


def test_warpgroups_take_turns():
    tile, wrong = rehearsed(2048, 2048, 128, 8, tw.Causal())
    assert tile.PINGPONG
    assert not wrong


EIGHT_BITS = {
    "int8": (128, {"QK_BITS": 8}),
    "fp8": (128, {"QK_BITS": 8, "PV_BITS": 8, "P_SCALE_LOG2": 8, "PROMOTE": "whole"}),
    "fp8, row sums by product": (
        128,
        {"QK_BITS": 8, "PV_BITS": 8, "P_SCALE_LOG2": 8, "PROMOTE": "whole", "SUM_BY_PRODUCT": True},
    ),
    "fp8 in halves": (256, {"QK_BITS": 8, "PV_BITS": 8, "P_SCALE_LOG2": 8, "PROMOTE": "halves", "B_C": 64}),
}


@pytest.mark.parametrize("mask", ["full", "causal", "window", "blocks"])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_tile_of_codes_is_multiplied_once(name, mask):
    D, changed = EIGHT_BITS[name]
    _, wrong = rehearsed(512, 512, D, 2, MASKS[mask], changed=changed)
    assert not wrong
