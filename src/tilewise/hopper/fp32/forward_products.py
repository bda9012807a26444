"""Multiply 16-bit pieces in the fp32 forward, split Q and P into pieces, and descale."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..backward.gradients import rounded
from ..parts import triton_compat
from ..parts.channel import arrive, stage, stage_in_loop, wait
from .split import largest, next_piece, power_of_two


@gluon.jit
def pieces_of(channel, y, TRANSPOSED: gl.constexpr, PIECES: gl.constexpr):
    """Return a key tile's pieces in shared memory."""
    found = ()
    for n in gl.static_range(PIECES):
        piece = stage(channel.memory, y * PIECES + n)
        found = found + ((piece.permute((1, 0)) if TRANSPOSED else piece),)
    return found


@gluon.jit
def product(a, b, zero, PIECES: gl.constexpr):
    """Start a b, in all the parts that count, the smallest first."""
    acc = zero
    for n in gl.static_range(PIECES):
        for i in gl.static_range(PIECES - n):
            acc = warpgroup_mma(a[PIECES - 1 - n - i], b[i], acc, use_acc=n + i > 0, is_async=True)
    return acc


@gluon.jit
def paired_product(q, channel, y, zero, tile: gl.constexpr):
    """Start S of key tile y in two parts: smallest products, and all others with the first two pieces in one
    product."""
    B_C: gl.constexpr = tile.B_C
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * B_C, 16])
    pair, rest = channel.memory
    pair, last = stage(pair, y).reshape([2 * B_C, tile.D]), stage(rest, y)
    low = warpgroup_mma(q[2], pair.slice(0, B_C, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
    low = warpgroup_mma(q[0], last.permute((1, 0)), low, is_async=True)
    zeros = gl.zeros([64, 2 * B_C], gl.float32, layout)
    both = warpgroup_mma(q[1], pair.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return low, warpgroup_mma(q[0], pair.permute((1, 0)), both, is_async=True)


@gluon.jit
def begin_logits(q, channel, y, zero, tile: gl.constexpr):
    """Start S of key tile y, in as many parts as it takes."""
    PIECES: gl.constexpr = tile.PIECES
    if tile.PAIRED:
        return paired_product(q, channel, y, zero, tile)
    else:
        return (product(q, pieces_of(channel, y, True, PIECES), zero, PIECES),)


@gluon.jit
def end_logits(parts, LATER: gl.constexpr, tile: gl.constexpr):
    """Return S, once no more products are under way than the LATER ones."""
    if tile.PAIRED:
        S, both = warpgroup_mma_wait(LATER, parts)
        first, second = gl.split(both.reshape([64, 2, tile.B_C]).permute((0, 2, 1)))  # moves nothing
        return S + gl.convert_layout(second, S.type.layout) + gl.convert_layout(first, S.type.layout)
    else:
        return warpgroup_mma_wait(LATER, parts)


@gluon.jit
def split_rows(whole, pieces, W: gl.constexpr, row_layout: gl.constexpr, tile: gl.constexpr):
    """Split 64 rows of Q into pieces in shared memory; return each row's descale factor."""
    PIECES: gl.constexpr = tile.PIECES
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    x = whole.reshape([64, tile.D]).load(layout)
    descale = gl.full([64], 1.0, gl.float32, row_layout)
    if PIECES == 2:
        scale, back = power_of_two(largest(x, 1))
        x = x * scale[:, None]
        descale = gl.convert_layout(back, row_layout)
    triton_compat.barrier()  # the pieces may take the place of what was read
    for n in gl.static_range(PIECES):
        piece, x = next_piece(x, pieces.dtype, n == PIECES - 1)
        pieces.index(slot(W, n)).store(piece)
    fence_async_shared()
    triton_compat.barrier()
    return descale


@gluon.jit
def q_pieces(pieces, y, W: gl.constexpr, tile: gl.constexpr):
    """Return a tile of Q for products with key tile y."""
    PIECES: gl.constexpr = tile.PIECES
    found = ()
    for n in gl.static_range(PIECES):
        found = found + (stage_in_loop(pieces, slot(W, n), y),)
    return found


@gluon.jit
def unit_of(c, shared, n, W: gl.constexpr, row_layout: gl.constexpr, tile: gl.constexpr):
    """Split the queries of tile n; return what turns their logits into base 2."""
    wait(shared.q.full, n)
    unit = c * split_rows(shared.q.memory.index(W), shared.pieces, W, row_layout, tile)
    if tile.Q_SEPARATE:
        arrive(shared.q.empty, n)
    return unit


@gluon.jit
def next_unit(unit, t, c, shared, shape, n, W: gl.constexpr, row_layout: gl.constexpr, tile: gl.constexpr):
    """Do the same for the next tile of queries, if there is one and Q_SEPARATE holds."""
    if tile.Q_SEPARATE:
        if t < shape.tiles * shape.heads:
            unit = unit_of(c, shared, n, W, row_layout, tile)
    return unit


@gluon.jit
def slot(W: gl.constexpr, n: gl.constexpr):
    """Return where piece n of warpgroup W's rows lies: the first two take the place of the rows themselves."""
    return 2 * W + n if n < 2 else 4 + W


@gluon.jit
def descale_of(X, t, tile: gl.constexpr):
    """Return the descale factor of key tile t."""
    if X.descale is None:
        return gl.to_tensor(1.0)
    else:
        return gl.load(X.descale + t // (tile.KEYS // tile.B_C))


@gluon.jit
def to_base_2(unit, descale):
    """Return the factor of a key tile's S: a normal number, so that a hidden key's -inf stays that, and 0 stays 0."""
    return gl.minimum(gl.maximum(unit * descale, 2.0**-126), 2.0**127)


@gluon.jit
def split_columns(P, dtype: gl.constexpr, layout: gl.constexpr, PIECES: gl.constexpr):
    """Return P's pieces, as left operands of products."""
    pieces = ()
    for _ in gl.static_range(PIECES):
        piece, value = rounded(P, dtype)
        pieces = pieces + (gl.convert_layout(piece, layout),)
        P = P - value
    return pieces


@gluon.jit
def accumulate_o(o, alpha, fresh, descale, P_SCALE_LOG2: gl.constexpr):
    """Add a tile's product to O: rescale O, and descale the product by V's and P's factors."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    if P_SCALE_LOG2:
        fresh = fresh * (descale * 2.0**-P_SCALE_LOG2)
    return o * alpha + fresh
