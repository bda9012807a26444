"""Split fp32 operands into 16-bit pieces, whose products the matrix unit sums up to an fp32 product.

    fp16x3    two fp16 pieces hold 22 bits, and exact powers of two keep them in fp16's range; three products count
    bf16x6    three bf16 pieces hold all 24 bits in fp32's own range; six products count

Each piece is the rounded rest of those before. Entries that are not finite are the exception: they go whole into the
last piece. The others are then 0, or finite in what the backward splits in registers. The last piece is multiplied only
with the first one of the other operand, which has its number's sign. So an infinity reaches the results that it reaches
in fp32, as the same infinity.

In memory, pieces lie in blocks: a sequence begins with a new block and ends in zeros, and a block has one scale. Blocks
of K and V are the key tiles of the backward, and one or two tiles of the forward.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.rows import fill_unused, first_block, origin, rows_of

INF = tl.constexpr(float("inf"))
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)
SAMPLES = tl.constexpr(16)


class Split(NamedTuple):
    """Hold an operand and what is made of it."""

    X: object
    pieces: object
    """Are (piece, block, row of the block, column)."""
    descale: object
    """Holds each block's descale factor."""
    norm: object = None
    """Holds the largest norm of a row of each block, or is None where it is not needed."""
    centre: object = None
    """Holds, for each head, what the backward subtracts from its rows, or is None where it is not needed."""


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Return the largest finite |x| along an axis, or of all; 0 if there is none."""
    return tl.max(tl.where(tl.abs(x) < INF, tl.abs(x), 0.0), AXIS)


@triton.jit
def power_of_two(top):
    """Return the scale 2^n that brings a finite number into [2^14, 2^15), where fp16 has most room. Return 2^-n, too,
    for the sake of which n is at most 126."""
    n = tl.minimum(141 - (top.to(tl.int32, bitcast=True) >> 23), 126)
    return ((127 + n) << 23).to(tl.float32, bitcast=True), ((127 - n) << 23).to(tl.float32, bitcast=True)


@triton.jit
def longest(x):
    """Return the largest finite norm of a row; rows are scaled, so that no square leaves fp32's range."""
    scale, descale = power_of_two(largest(x, None))
    x *= scale
    return largest(tl.sqrt(tl.sum(x * x, 1)), 0) * descale


@triton.jit
def next_piece(rest, TYPE: tl.constexpr, LAST: tl.constexpr):
    """Return the next piece of a remainder, and the remainder after it."""
    whole = rest
    if not LAST:
        whole = tl.where(tl.abs(rest) < INF, rest, 0.0)
        if TYPE == tl.bfloat16:  # it would round fp32's last numbers up to inf
            whole = tl.minimum(tl.maximum(whole, -LARGEST_BF16), LARGEST_BF16)
    piece = whole.to(TYPE)
    return piece, rest - piece.to(tl.float32)


@triton.jit
def load_block(X, b, h, first, rows, length, d: tl.constexpr, SIZE: tl.constexpr):
    """Load rows of a head, zero past the length and the head size."""
    entries = tl.arange(0, SIZE)
    inside = (rows < length)[:, None] & (entries < d)[None, :]
    at = origin(X, b, h, first) + rows.to(tl.int64)[:, None] * X.row + entries[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_pieces(to, x, block, blocks):
    """Store numbers as block `block` of `blocks`: their pieces, the descale factor of fp16's, and their norm."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    TYPE: tl.constexpr = to.pieces.dtype.element_ty
    COUNT: tl.constexpr = 2 if TYPE == tl.float16 else 3
    if to.norm is not None:
        tl.store(to.norm + block, longest(x))
    if TYPE == tl.float16:
        scale, back = power_of_two(largest(x, None))
        x = x * scale
        tl.store(to.descale + block, back)
    at = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    for n in tl.static_range(COUNT):
        piece, x = next_piece(x, TYPE, n == COUNT - 1)
        tl.store(to.pieces + (tl.cast(n, tl.int64) * blocks + block) * (ROWS * SIZE) + at, piece)


@triton.jit
def centre(X, b, h, first, length, d: tl.constexpr, SIZE: tl.constexpr):
    """Return the mean of a sample of rows if all of them are nearer to it than it is to zero, else zero.

    Garbage behind a mask may be in the sample: then some real row is far from the mean.
    """
    rows = tl.arange(0, SAMPLES).to(tl.int64) * length // SAMPLES
    x = load_block(X, b, h, first, rows, length, d, SIZE)
    mean = tl.sum(x, 0) / SAMPLES
    away = tl.sqrt(tl.max(tl.sum((x - mean[None, :]) * (x - mean[None, :]), 1), 0))
    near = away < 0.75 * tl.sqrt(tl.sum(mean * mean, 0))  # false where anything is not finite
    return tl.where(near, mean, 0.0)


@triton.jit(do_not_specialize=["packed", "unused", "M", "N", "H", "tiles", "stride", "blocks"])
def attention_split_fp32(
    operands, packed, unused, M, N, H, tiles, stride, blocks,
    KEYS: tl.constexpr, SIZES: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Split a block of one of the operands, which share their rows: those of the keys, or of the queries. With the
    first block of a head, compute its centre. Before a forward, also fill the rows of its outputs outside all
    sequences. PDL: the next kernel may begin, and waits for this one where it reads pieces."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    COUNT: tl.constexpr = len(SIZES)  # Triton 3.6 has no length of operands with a None inside
    which, program = tl.program_id(0) % COUNT, tl.program_id(0) // COUNT
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    first, length, k0, N = rows_of(packed, b, M, N)
    if KEYS:
        first, length = k0, N
    if t * ROWS < length or t == 0:  # the first exists even where there are no rows: kernels read it, masked
        block = first_block(packed, b, h, H, first, stride, ROWS).to(tl.int64) + t
        rows = t * ROWS + tl.arange(0, ROWS)
        for n in tl.static_range(COUNT):
            if which == n:
                x = load_block(operands[n].X, b, h, first, rows, length, SIZES[n], SIZE)
                store_pieces(operands[n], x, block, blocks)
                if operands[n].centre is not None:
                    if t == 0:
                        at = operands[n].centre + (b * H + h) * SIZE + tl.arange(0, SIZE)
                        tl.store(at, centre(operands[n].X, b, h, first, length, SIZES[n], SIZE))
