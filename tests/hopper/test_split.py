"""Splitting fp32 operands into 16-bit pieces, in Triton's interpreter where there is no GPU."""

import pytest
import torch

from tilewise.hopper.fp32.split import Split, attention_split_fp32
from tilewise.tile.rows import Packed, Rows, Unused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {"fp16x3": torch.float16, "bf16x6": torch.bfloat16}
ROWS, SIZE = 16, 64
LOST = {"fp16x3": (2.0**-22, 2.0**-39, 0.0), "bf16x6": (0.0, 0.0, 2.0**-126)}
"""At most lost by all pieces together: of an entry, of its block's largest, and in any case (the interpreter flushes
what bf16 has below)."""


def cut(name, *tensors, packed=None):
    """The pieces and the undoing factors of tensors that share their rows, with NaN where nothing was written."""
    batch, H = (1, tensors[0].shape[1]) if packed else (tensors[0].shape[0], tensors[0].shape[2])
    N = tensors[0].shape[-3]
    entries = len(packed.cu_k) - 1 if packed else batch
    stride = N // ROWS + entries if packed else -(-N // ROWS)
    tiles = -(-N // ROWS)
    blocks = stride * H * batch
    count = 2 if name == "fp16x3" else 3
    operands = [
        Split(
            Rows(t, 0, t.stride(0), t.stride(1)) if packed else Rows(t, t.stride(0), t.stride(1), t.stride(2)),
            torch.full((count, blocks, ROWS, SIZE), torch.nan, dtype=TYPES[name], device=DEVICE),
            torch.full((blocks,), torch.nan, device=DEVICE),
        )
        for t in tensors
    ]
    attention_split_fp32[(len(operands) * tiles * H * entries,)](
        tuple(operands), packed, Unused((), (), None, 1, 1, 1), N, N, H, tiles, stride, blocks,
        KEYS=True, SIZES=tuple(t.shape[-1] for t in tensors), ROWS=ROWS, SIZE=SIZE,
    )  # fmt: skip
    return [(operand.pieces, operand.descale) for operand in operands]


def joined(name, pieces, descale):
    """The numbers that pieces stand for, by head and row, in fp64."""
    total = pieces.double().sum(0)
    return total * descale[:, None, None] if name == "fp16x3" else total


def blocks_of(t):
    """A tensor (B, N, H, d) as blocks of rows with zeros past its end."""
    B, N, H, d = t.shape
    whole = t.new_zeros(B, H, -(-N // ROWS) * ROWS, SIZE)
    whole[:, :, :N, :d] = t.transpose(1, 2)
    return whole.view(-1, ROWS, SIZE)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e37])
def test_pieces_sum_up_to_the_number(name, size):
    k, v = torch.randn(2, 37, 3, 40, device=DEVICE) * size, torch.randn(2, 37, 3, 64, device=DEVICE) * size
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # any strides
    for t, (pieces, descale) in zip((k, v), cut(name, k, v), strict=True):
        x = blocks_of(t)
        lost = (joined(name, pieces, descale) - x.double()).abs()
        of_entry, of_block, flushed = LOST[name]
        allowed = of_entry * x.double().abs() + of_block * x.double().abs().amax((1, 2), keepdim=True) + flushed
        assert (lost <= allowed).all()
        assert not pieces[:, x == 0.0].any(), "past the end lie zeros"


def test_scales_are_powers_of_two_that_keep_fp16_in_range():
    sizes = torch.logspace(-44, 37, 5, device=DEVICE)
    k = torch.randn(5, ROWS, 64, device=DEVICE) * sizes[:, None, None]
    ((pieces, descale),) = cut("fp16x3", k.view(1, 5 * ROWS, 1, 64))
    assert (torch.frexp(descale).mantissa == 0.5).all()
    top = pieces[0].abs().amax((1, 2))
    assert (top[1:] >= 2.0**14).all()
    assert (top <= 2.0**15).all()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_alone_in_the_last_piece(name, number):
    clean = torch.randn(1, 40, 2, 64, device=DEVICE)
    clean[0, 3, 1, 2] = 0.5  # not its block's largest
    k = clean.clone()
    k[0, 3, 1, 2] = number
    (before, descale_before), (pieces, descale) = cut(name, clean, k)
    odd = ~pieces.isfinite()
    assert odd.sum() == 1
    assert odd[-1, 3, 3, 2], "row 3 of the second head's first block of three"
    assert torch.equal(
        pieces[-1][odd[-1]].float().nan_to_num(nan=7.0), torch.tensor([number]).nan_to_num(nan=7.0).to(DEVICE)
    )
    assert not pieces[:-1, 3, 3, 2].any()
    others = torch.ones_like(odd[0])
    others[3, 3, 2] = False
    assert torch.equal(pieces[:, others], before[:, others])
    assert torch.equal(descale.nan_to_num(), descale_before.nan_to_num())


def test_the_largest_numbers_of_fp32_do_not_round_to_infinity():
    k = torch.full((1, 16, 1, 64), torch.finfo(torch.float32).max, device=DEVICE)
    for name in TYPES:
        ((pieces, descale),) = cut(name, k)
        assert pieces.isfinite().all()
        assert torch.allclose(joined(name, pieces, descale), k.double().view(1, 16, 64), rtol=LOST[name][0], atol=0.0)


@pytest.mark.parametrize("name", TYPES)
def test_packed_sequences_have_blocks_of_their_own(name):
    lengths = [17, 0, 16, 5]
    cu = torch.tensor([0, 17, 17, 33, 38], dtype=torch.int32, device=DEVICE)
    k = torch.randn(38, 2, 64, device=DEVICE)
    ((pieces, descale),) = cut(name, k, packed=Packed(cu, cu, 35, 35))
    whole = joined(name, pieces, descale).view(2, -1, SIZE)
    stride = whole.shape[1] // ROWS
    for h in range(2):
        for b, length in enumerate(lengths):
            first = (int(cu[b]) // ROWS + b) * ROWS
            assert first < stride * ROWS
            rows = whole[h, first : first + max(1, -(-length // ROWS)) * ROWS]
            assert torch.allclose(rows[:length], k[cu[b] : cu[b + 1], h].double(), rtol=2.0**-22, atol=2.0**-38)
            assert not rows[length:].any(), "zeros past the end, and a block of them where nothing is"
