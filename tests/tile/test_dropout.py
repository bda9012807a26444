"""Dropout inside a tile: the same decisions as the reference's, in tiles of every shape and either way round."""

import pytest
import torch

from tilewise.values.dropout import dropout_keep, dropout_rescale, dropout_threshold

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
dropout = pytest.importorskip("tilewise.tile.dropout")
ranges = pytest.importorskip("tilewise.tile.ranges")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = -5


@triton.jit
def dropout_factors(Z, operands, row, i0, j0, B_R: tl.constexpr, B_C: tl.constexpr, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        i, j = tl.arange(0, B_R)[None, :], tl.arange(0, B_C)[:, None]
    else:
        i, j = tl.arange(0, B_R)[:, None], tl.arange(0, B_C)[None, :]
    place = ranges.Place(0, row, row, i0, 0, 0, 0)
    tl.store(Z + i * B_C + j, dropout.dropout_mask(operands, place, i0, i, j0, j))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("B_r", "B_c"), [(16, 16), (64, 16), (32, 32), (16, 128), (128, 64)])
def test_tiles_decide_as_the_reference(B_r, B_c, transposed):
    seed = torch.tensor(SEED, device=DEVICE)
    for p in (2.0**-18, 2.0**-16, 0.3, 0.8, 1 - 2.0**-18):
        threshold, rescale = dropout_threshold(p), dropout_rescale(p)
        for m, n in ((0, 0), (3, 5), (4, 6), (1, 7)):
            Z = torch.empty(B_r, B_c, device=DEVICE)
            operands = dropout.Dropout(seed, threshold, rescale)
            dropout_factors[(1,)](Z, operands, 7, m * B_r, n * B_c, B_r, B_c, transposed)
            i, j = m * B_r + torch.arange(B_r)[:, None], n * B_c + torch.arange(B_c)
            keep = dropout_keep(SEED, torch.tensor(7), i, j, p)
            torch.testing.assert_close(Z.cpu(), keep * rescale)
