"""Dropout's bits on Hopper, held against the reference: the role that rolls them runs in numpy here, without a GPU."""

import importlib
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch

from tilewise.values.dropout import dropout_keep, dropout_threshold

dropout_bits = pytest.importorskip("tilewise.hopper.parts.dropout_bits", reason="Triton is not installed")

Counters = importlib.import_module("tilewise.tile.dropout").Counters
SEED = 0x123456789ABCDEF


class Tile(np.ndarray):
    """A tensor of Gluon, as far as the dropout_bits go."""

    def to(self, dtype):
        return self.astype(dtype)

    def permute(self, order):
        return self.transpose(order)


def tile(x, dtype):
    return np.asarray(x, dtype).view(Tile)


GLUON = SimpleNamespace(
    int32=np.int32, uint32=np.uint32, uint64=np.uint64, static_range=range, constexpr=object,
    SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None, zeros_like=np.zeros_like,
    static_assert=lambda held: None if held else pytest.fail("a static assertion of dropout_bits.py"),
    arange=lambda start, end, _: tile(np.arange(start, end), np.int32),
    add=lambda a, b, sanitize_overflow: a + np.uint32(b),
    join=lambda a, b: np.stack((a, b), -1).view(Tile),
    sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
)  # fmt: skip


def in_numpy():
    """The functions of dropout_bits.py, with numpy in Gluon's place."""
    names: dict = {"gl": GLUON, "min": min, "range": range, "len": len}
    used = "in_whole philox add dropout_words words_by_query words_by_key keep_bits at_least"
    names |= {name: FunctionType(getattr(dropout_bits, name).fn.__code__, names) for name in used.split()}
    return SimpleNamespace(**names)


def read(words, columns):
    """Which entries the words keep. A word has one half of the columns, and rows 8 apart: in byte 2 x (lower row) +
    (odd block of 8 columns), bit 7 - 2 x (16 columns) - (second of a pair)."""
    up, q, right, entry = np.ix_(range(2), range(columns // 32), range(2), range(2))
    bits = np.asarray(words)[..., None, None, None, None] >> 8 * (2 * up + right) + 7 - 2 * q - entry & 1
    bits = bits.transpose(1, 4, 2, 0, 5, 6, 3, 7)  # 16 rows, lower, row; half, 16 columns, odd, thread, entry
    return torch.from_numpy(bits.reshape(16 * words.shape[1], columns)) == 1


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize(
    ("rows", "columns", "transposed", "warps"),
    [(64, 128, False, 4), (64, 64, False, 2), (128, 64, True, 4), (128, 64, True, 2), (64, 64, True, 2)],
    ids=["forward", "forward at 256", "backward at 64", "backward at 128", "backward at 256"],
)
def test_the_bits_are_the_decisions_of_the_reference(rows, columns, transposed, warps, p):
    i0, j0, matrix = 192, 384, 5
    threshold = tile(dropout_threshold(p), np.uint32)
    with np.errstate(over="ignore"):  # the keys' steps are modulo 2^32
        words = in_numpy().dropout_words(
            tile(SEED, np.int64), threshold, matrix, i0, j0, rows, columns, transposed, warps
        )  # fmt: skip
    assert words.shape == (2, rows // 16, 8, 4)
    found = read(words, columns)
    M, N = (columns, rows) if transposed else (rows, columns)
    i, j = torch.arange(i0, i0 + M)[:, None], torch.arange(j0, j0 + N)
    keep = dropout_keep(SEED, torch.tensor(matrix), i, j, p)
    assert torch.equal(found.T if transposed else found, keep)
    assert bool(keep.any())
    assert not bool(keep.all())


def test_a_call_counts_from_its_place_in_the_whole():
    place, in_whole = SimpleNamespace(b=1, h=2, matrix=7), in_numpy().in_whole
    assert in_whole((), place, 64, 128) == (7, 64, 128)
    counters = Counters(*(2 * n + 1 for n in (48, 192, 9, 5 * 9 + 3)))  # row, column, heads of the whole, first matrix
    assert in_whole(counters, place, 64, 128) == ((5 + 1) * 9 + 3 + 2, 112, 320)
