"""The backward's roles, rehearsed: every tile is multiplied once, masked where it must be, and nobody waits forever."""

from collections import Counter

import pytest
import torch
from hopper.calls import call
from hopper.rehearsal import Rehearsal, rehearse

import tilewise as tw

H = 8
ENDS = torch.tensor([0, 200, 200, 265, 700], dtype=torch.int32)
"""Of packed queries, and keys."""


def blocks(M: int, N: int) -> torch.Tensor:
    """Empty, full and partial tiles, others in every head; the first head sees nothing, the last all but some keys."""
    chance = torch.linspace(0, 1, H)[:, None, None]
    coarse = torch.rand(H, M // 64, N // 64, generator=torch.Generator().manual_seed(0)) < chance
    return coarse.repeat_interleave(64, 1).repeat_interleave(64, 2) & (torch.arange(N) % 300 != 7)


MASKS = {
    "full": tw.Full(),
    "causal": tw.Causal(),
    "window": tw.Causal() & tw.Window(150, 0),
    "open": tw.Window(None, 70),
    "prefix": tw.Prefix(torch.tensor([200])),
    "blocks": tw.Dense(blocks(512, 512)),
}


def rehearsed(M, N, D, H_k, mask, programs=3, section=2, **given):
    """What happens, held against the mask written out."""
    seen = mask.dense(M, N).reshape(-1, M, N).expand(H, M, N)
    found = rehearse(*call(M, N, D, H, H_k, batch=(1,), mask=mask, **given), seen, programs, section)
    check(found, H_k, [(0, 0, seen)])
    return found.tile


def check(found: Rehearsal, H_k, sequences):
    """`sequences`: the first query, the first key and the mask of each."""
    tile = found.tile
    masks, first, block = {}, {}, {}
    for b, (q0, k0, seen) in enumerate(sequences):
        first[b] = q0, k0
        _, M, N = seen.shape
        for h in range(H):
            for i in range(0, M, tile.B_R):
                block[h, q0 + i] = h * found.blocks + (q0 // tile.B_R + b if len(sequences) > 1 else 0) + i // tile.B_R
                for j in range(0, N, 64):
                    masks[h, q0 + i, k0 + j] = seen[h, i : i + tile.B_R, j : j + 64]
    visited, adds, stored, products, asked = set(), Counter(), Counter(), Counter(), Counter()
    for kind, *what in found.events:
        if kind == "product" and what[0][0] == "k":
            (_, _, h_k, j, _), rows, (_, _, h, i, _) = what
            assert h_k == h * H_k // H
            products[h, i, j + rows] += 1
            visited.add((h, i, j))
        elif kind == "weights":
            b, h, i, j, edge = what
            where = h, first[b][0] + i, first[b][1] + j
            asked[where] += 1
            assert edge or (masks[where].all() and masks[where].shape == (tile.B_R, 64)), f"{where} needs the mask"
        elif kind == "added":
            adds[what[0] // 16] += 1
        elif kind == "stored":
            stored[tuple(what)] += 1
    assert asked == products
    for where, part in masks.items():
        assert products[where] == 1 or (products[where] == 0 and not part.any()), where
    walks = Counter((h, i) for h, i, _ in visited)
    pieces = tile.D * tile.B_R // 4096
    for where, number in block.items():
        for piece in range(pieces):  # of a single one, both groups add their part
            assert adds[number * pieces + piece] == walks[where] * (2 if pieces == 1 else 1), where
    rows = {k0 + j for _, k0, seen in sequences for j in range(0, seen.shape[2], 64)}
    boxes = {(g, 0, h, row): 1 + tile.SIDES for g in ("dk", "dv") for h in range(H_k) for row in rows}
    assert {box: stored[box] for box in boxes} == boxes


@pytest.mark.parametrize("H_k", [8, 2, 1])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_every_tile_is_multiplied_once(mask, D, H_k):
    rehearsed(512, 512, D, H_k, MASKS[mask])


@pytest.mark.parametrize("H_k", [8, 1])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("given", [{"deterministic": True}, {"dropout": 0.1}, {"score": tw.SoftCap(50.0)}], ids=str)
def test_with_more_asked_for(given, mask, D, H_k):
    rehearsed(512, 512, D, H_k, MASKS[mask], **given)


@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize(("M", "N"), [(300, 700), (700, 300), (65, 129), (1, 500)])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ragged_lengths(mask, M, N, programs):
    rehearsed(M, N, 128, 2, MASKS[mask], programs)


@pytest.mark.parametrize("H_k", [8, 2])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_packed_sequences(mask, D, H_k):
    last, longest = int(ENDS[-1]), int(ENDS.diff().max())
    layout = tw.Varlen(ENDS, ENDS, longest, longest)
    p, x = call(last, last, D, H, H_k, batch=(), mask=MASKS[mask], layout=layout)
    found = rehearse(p, x, torch.empty(0), 3, 1)
    starts, sizes = ENDS.tolist(), ENDS.diff().tolist()
    masks = [MASKS[mask].dense(size, size).expand(H, size, size) for size in sizes]
    check(found, H_k, list(zip(starts, starts, masks, strict=False)))


def test_walks_share_keys():
    assert rehearsed(2560, 512, 128, 1, tw.Causal(), section=3).SHARES > 1
