"""The forward's roles, rehearsed: every tile is multiplied once, masked where it must be, and nobody waits forever."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
from hopper.calls import call
from hopper.rehearsal import Rehearsal, rehearse_forward
from hopper.scenes import ENDS, MASKS, H, packed

import tilewise as tw


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
                for j in range(0, N, B_C):
                    where, part = (h, q0 + i, k0 + j), seen[h, i : i + 64, j : j + B_C]
                    if read.products[where] != 1 and (read.products[where] or part.any()):
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
        self.begun = set()  # roles that have multiplied one half of V's columns

    def product(self, role, left, _, right):
        """Of Q and K."""
        (_, _, h, i, _), (_, _, h_k, j, _) = left, right
        self.products[h, i, j] += 1
        self.pairs.add((h, h_k))
        self.waiting[role].append((h_k, j))

    def weighed(self, role, right):
        """Of P and V: of the same keys as the product with K before."""
        _, _, h_k, j, column = right
        if self.tile.PV_BITS == 8:  # transposed, in tiles of 128 keys
            j = j // self.tile.D * 128 + column
        half = self.tile.PROMOTE == "halves" and role not in self.begun
        self.begun = self.begun | {role} if half else self.begun - {role}
        if self.waiting[role][:1] != [(h_k, j)] or not (half or self.waiting[role].pop(0)):
            self.wrong.append(f"V of key head {h_k} from key {j} on is another P's")

    def asked(self, _, b, h, i, j):
        """For the mask."""
        q0, k0, _ = self.sequences[b]
        self.masked.add((h, q0 + i, k0 + j))

    def stored(self, _, name, b, h, row):
        """Rows of O."""
        self.rows[h, row] += 1


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
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("M", "N"), [(300, 700), (700, 300), (65, 129), (1, 500)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ragged_lengths(mask, M, N, D, programs):
    _, wrong = rehearsed(M, N, D, 2, MASKS[mask], programs)
    assert not wrong


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_packed_sequences(mask, D):
    layout, sequences = packed(MASKS[mask])
    last = int(ENDS[-1])
    p, x = call(last, last, D, H, 2, batch=(), mask=MASKS[mask], layout=layout)
    assert not list(faults(rehearse_forward(p, x, torch.empty(0), 3, 1), 2, sequences))


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
