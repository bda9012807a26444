"""Sum over key tiles: O += P V, and for some 8-bit codes the rows of P.

Products of 16 bits are summed in the tensor cores. There sums of 8-bit products would drift with length. So each begins
at zero and joins O in registers, one key tile late: it then runs during the softmax.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..parts.channel import named_barrier, stage, wait
from .eight_bits import unpack, with_nan


class Sums(NamedTuple):
    """Hold the sums over the key tiles so far; 0 in place of what a tile does without, as functions return no None."""

    o: object
    """Holds O; its left half where it is summed in halves."""
    o_right: object
    """Holds the right half."""
    l: object
    """Holds the sums of P's rows where products compute them."""
    alpha: object
    """Is the factor that O takes when the next product joins it."""
    alpha_l: object


class Products(NamedTuple):
    """Hold the products of a key tile that are under way, likewise."""

    o: object
    l: object


@gluon.constexpr_function
def accumulator(columns, bits):
    """Return the layout of a product's 64 rows, of factors with so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.jit
def no_sums(layout: gl.constexpr, tile: gl.constexpr):
    """Return sums over no key tile; `layout` is that of S."""
    COLUMNS: gl.constexpr = tile.D // 2 if tile.PROMOTE == "halves" else tile.D
    o = gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS, tile.PV_BITS))
    one_a_row = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    return Sums(
        o,
        o if tile.PROMOTE == "halves" else 0,
        gl.zeros([64, 8], gl.float32, accumulator(8, tile.PV_BITS)) if tile.SUM_BY_PRODUCT else 0,
        one_a_row if tile.PROMOTE != "none" else 0,
        one_a_row if tile.SUM_BY_PRODUCT else 0,
    )


@gluon.jit
def weigh(p, v, o, tile: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Start O += P V, or a new O."""
    if tile.PV_BITS == 8:
        v = v.reshape([tile.D, tile.B_C]).slice(COLUMN, o.shape[1], 0).permute((1, 0))
        p = unpack(p, gl.DotOperandLayout(0, o.type.layout, 4))
    else:
        v = v.reshape([tile.B_C, tile.D])
    return warpgroup_mma(p, v, o, use_acc=tile.PROMOTE == "none", is_async=True)


@gluon.jit
def sum_rows(p, ones, l):
    """Start the sums of P's rows."""
    p = unpack(p, gl.DotOperandLayout(0, l.type.layout, 4))
    return warpgroup_mma(p, ones.permute((1, 0)), l, use_acc=False, is_async=True)


@gluon.jit
def added(x, alpha, new):
    """Return x * alpha + new; alpha is a factor for each row."""
    return x * gl.convert_layout(alpha, gl.SliceLayout(1, x.type.layout))[:, None] + new


@gluon.jit
def join_halves(sums, p, shared, y, W: gl.constexpr, tile: gl.constexpr):
    """Let P V of key tile y join the left half of O's columns and then the right: registers hold half of P V. W is the
    warpgroup that waits for its turn, or None."""
    if tile.PROMOTE != "halves":
        return sums
    else:
        wait(shared.v.full, y)
        if W is not None:  # one turn is both halves and S: only their additions leave the tensor cores idle
            named_barrier("sync", W)
        v = stage(shared.v.memory, y)
        zero = gl.zeros_like(sums.o)
        o = added(sums.o, sums.alpha, warpgroup_mma_wait(0, [weigh(p, v, zero, tile)]))
        o_right = added(sums.o_right, sums.alpha, warpgroup_mma_wait(0, [weigh(p, v, zero, tile, zero.shape[1])]))
        return Sums(o, o_right, sums.l, sums.alpha, sums.alpha_l)


@gluon.jit
def start_products(sums, p, shared, y, tile: gl.constexpr):
    """Start the products of P that are not summed in halves."""
    l = sum_rows(p, shared.ones, gl.zeros_like(sums.l)) if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE == "halves":
        return Products(0, l)
    else:
        wait(shared.v.full, y)
        o = sums.o if tile.PROMOTE == "none" else gl.zeros_like(sums.o)
        return Products(weigh(p, stage(shared.v.memory, y), o, tile), l)


@gluon.jit
def finish_products(products, tile: gl.constexpr):
    """Wait until the products are complete."""
    if tile.PROMOTE == "halves":
        return Products(0, warpgroup_mma_wait(0, [products.l]) if tile.SUM_BY_PRODUCT else 0)
    elif tile.SUM_BY_PRODUCT:
        o, l = warpgroup_mma_wait(0, [products.o, products.l])
        return Products(o, l)
    else:
        return Products(warpgroup_mma_wait(0, [products.o]), 0)


@gluon.jit
def join(sums, products, tile: gl.constexpr):
    """Let complete products join the sums."""
    l = added(sums.l, sums.alpha_l, products.l) if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE == "halves":
        return Sums(sums.o, sums.o_right, l, sums.alpha, sums.alpha_l)
    elif tile.PROMOTE == "whole":
        return Sums(added(sums.o, sums.alpha, products.o), 0, l, sums.alpha, sums.alpha_l)
    else:
        return Sums(products.o, 0, l, 0, sums.alpha_l)


@gluon.jit
def rescale(sums, alpha, alpha_o, tile: gl.constexpr):
    """Rescale the sums to the new row max, by alpha and O by alpha_o; at once, or when the next products join them."""
    alpha_l = alpha if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE != "none":
        return Sums(sums.o, sums.o_right, sums.l, alpha_o, alpha_l)
    elif tile.BOUNDED:
        return sums
    else:
        o = sums.o * gl.convert_layout(alpha_o, gl.SliceLayout(1, sums.o.type.layout))[:, None]
        return Sums(o, 0, sums.l, 0, alpha_l)


@gluon.jit
def totals(sums, l, m, tile: gl.constexpr):
    """Return O of all columns, and the row sums: l, or what products summed."""
    if tile.SUM_BY_PRODUCT:
        l = with_nan(gl.convert_layout(gl.max(sums.l, 1), m.type.layout), m)
    if tile.PROMOTE == "halves":
        o = gl.join(sums.o, sums.o_right).permute((0, 2, 1)).reshape([64, tile.D])
        return gl.convert_layout(o, accumulator(tile.D, tile.PV_BITS)), l
    else:
        return sums.o, l
