"""Sum over key tiles: O += P V, and for some 8-bit codes the rows of P.

Products of 16 bits are summed in the tensor cores. There sums of 8-bit products would drift with length. So each begins
at zero and joins O in registers, one key tile late: it then runs during the softmax.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..parts.channel import in_order, named_barrier, wait
from ..parts.pieces import by_rows, expand, pieces_of, tile_at, times, wait_for
from .eight_bits import unpack, with_nan


class Sums(NamedTuple):
    """Hold the sums over the key tiles so far; 0 in place of what a tile does without, as functions return no None."""

    o: object
    """Holds O, in pieces of its columns, or in halves."""
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


@gluon.constexpr_function
def summed_at_once(tile):
    """Return the columns of O that one product sums, for all its products."""
    return (tile.D_V // 2,) * 2 if tile.PROMOTE == "halves" else pieces_of(tile.D_V)


@gluon.jit
def zeros(COLUMNS: gl.constexpr, BITS: gl.constexpr):
    """Return zeros that lie as a product does."""
    return gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS, BITS))


@gluon.constexpr_function
def rescales_late(tile):
    """Return whether O takes its factor once most of the next S is under way, which hides these multiplications."""
    return tile.K_PIECES > 1 and not tile.BOUNDED


@gluon.jit
def no_sums(layout: gl.constexpr, tile: gl.constexpr):
    """Return sums over no key tile; `layout` is that of S."""
    COLUMNS: gl.constexpr = summed_at_once(tile)
    o = ()
    for p in gl.static_range(len(COLUMNS)):
        o += (zeros(COLUMNS[p], tile.PV_BITS),)
    one_a_row = gl.zeros([64], gl.float32, gl.SliceLayout(1, layout))
    return Sums(
        o,
        zeros(8, tile.PV_BITS) if tile.SUM_BY_PRODUCT else 0,
        one_a_row if tile.PROMOTE != "none" or rescales_late(tile) else 0,
        one_a_row if tile.SUM_BY_PRODUCT else 0,
    )


@gluon.jit
def weigh_codes(p, v, o, COLUMN: gl.constexpr, tile: gl.constexpr):
    """Start O += P V of codes, or a new O, in the columns from COLUMN on."""
    v = v.slice(COLUMN, o.shape[1], 0).permute((1, 0))
    p = unpack(p, gl.DotOperandLayout(0, o.type.layout, 4))
    return warpgroup_mma(p, v, o, use_acc=tile.PROMOTE == "none", is_async=True)


@gluon.jit
def sum_rows(p, ones, l):
    """Start the sums of P's rows."""
    p = unpack(p, gl.DotOperandLayout(0, l.type.layout, 4))
    return warpgroup_mma(p, ones.permute((1, 0)), l, use_acc=False, is_async=True)


@gluon.jit
def added(x, alpha, new):
    """Return x * alpha + new; alpha is a factor for each row."""
    return by_rows(x, alpha) + new


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
        v = tile_at(shared.v.memory, y)[0]
        zero = gl.zeros_like(sums.o[0])
        left = added(sums.o[0], sums.alpha, warpgroup_mma_wait(0, [weigh_codes(p, v, zero, 0, tile)]))
        right = warpgroup_mma_wait(0, [weigh_codes(p, v, zero, zero.shape[1], tile)])
        return Sums((left, added(sums.o[1], sums.alpha, right)), sums.l, sums.alpha, sums.alpha_l)


@gluon.jit
def start_products(sums, p, shared, y, tile: gl.constexpr):
    """Start the products of P that are not summed in halves."""
    l = sum_rows(p, shared.ones, gl.zeros_like(sums.l)) if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE == "halves":
        return Products(0, l)
    else:
        wait(shared.v.full, y)
        v = tile_at(shared.v.memory, y)
        if tile.PV_BITS == 8:
            o = sums.o[0] if tile.PROMOTE == "none" else gl.zeros_like(sums.o[0])
            return Products((weigh_codes(p, v[0], o, 0, tile),), l)
        else:
            return Products(expand(p, v, times(sums.o, in_order(sums.alpha)) if rescales_late(tile) else sums.o), l)


@gluon.jit
def finish_products(products, tile: gl.constexpr):
    """Wait until the products are complete."""
    if tile.PROMOTE == "halves":
        return Products(0, warpgroup_mma_wait(0, [products.l]) if tile.SUM_BY_PRODUCT else 0)
    elif tile.SUM_BY_PRODUCT:
        o, l = warpgroup_mma_wait(0, [products.o[0], products.l])
        return Products((o,), l)
    else:
        return Products(wait_for(0, products.o), 0)


@gluon.jit
def join(sums, products, tile: gl.constexpr):
    """Let complete products join the sums."""
    l = added(sums.l, sums.alpha_l, products.l) if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE == "halves":
        return Sums(sums.o, l, sums.alpha, sums.alpha_l)
    elif tile.PROMOTE == "whole":
        return Sums((added(sums.o[0], sums.alpha, products.o[0]),), l, sums.alpha, sums.alpha_l)
    else:
        return Sums(products.o, l, 0, sums.alpha_l)


@gluon.jit
def rescale(sums, alpha, alpha_o, tile: gl.constexpr):
    """Rescale the sums to the new row max, by alpha and O by alpha_o; at once, or when the next products join them."""
    alpha_l = alpha if tile.SUM_BY_PRODUCT else 0
    if tile.PROMOTE != "none" or rescales_late(tile):
        return Sums(sums.o, sums.l, alpha_o, alpha_l)
    elif tile.BOUNDED:
        return sums
    else:
        return Sums(times(sums.o, alpha_o), sums.l, 0, alpha_l)


@gluon.jit
def totals(sums, l, m, tile: gl.constexpr):
    """Return O of all columns, and the row sums: l, or what products summed."""
    if tile.SUM_BY_PRODUCT:
        l = with_nan(gl.convert_layout(gl.max(sums.l, 1), m.type.layout), m)
    if tile.PROMOTE == "halves":
        o = gl.join(sums.o[0], sums.o[1]).permute((0, 2, 1)).reshape([64, tile.D_V])
        return (gl.convert_layout(o, accumulator(tile.D_V, tile.PV_BITS)),), l
    else:
        return sums.o, l
