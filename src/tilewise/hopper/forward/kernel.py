"""Compute the forward on Hopper: one persistent program per multiprocessor, its warps in roles.

    load          one warp      loads tiles of Q, K and V into shared memory by TMA, and fetches the next tile's number
    attend        warpgroups    compute 64 rows of queries each: S = Q K^T, the online softmax in registers, O += P V
    produce_bits  2 or 4 warps  with dropout only: generate its mask bits

Matrix products are asynchronous. S of the next key tile is started before O += P V of this one. So both run while the
other warpgroup does its softmax (FlashAttention-3, section 3). Tile numbers come from a counter in memory,
longest tiles first.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..parts import triton_compat
from ..parts.call import Call
from ..parts.channel import Channel, barriers, launch_dependents
from ..parts.dropout_bits import bits
from ..parts.pieces import allocate
from ..parts.queue import tile_channel
from .attend import attend
from .eight_bits import ones_of, values
from .load import load, produce_bits


class Tile(NamedTuple):
    """Hold what a kernel is compiled for; all are constants."""

    WARPGROUPS: int
    """Counts the warpgroups, of 64 query rows each."""
    B_C: int
    D: int
    """Counts the columns of a row of Q or K in shared memory, which lie in pieces (parts/pieces.py)."""
    D_V: int
    """Counts those of a row of V or O."""
    Q_STAGES: int
    KV_STAGES: int
    PINGPONG: bool
    """Says whether named barriers order the warpgroups' products (ping-pong)."""
    MASK_IN_LOOP: bool
    """Says whether other key tiles than a warpgroup's first may need the mask."""
    HALF_FIRST_TILE: bool
    """Says whether warpgroup 0 sees only half of its first key tile: the diagonal of a square tile."""
    FETCH_EARLY: bool
    """Says whether the next tile's number is fetched after the second load rather than after the last."""
    DROPOUT_WARPS: int
    """Counts the warps that generate dropout bits; without dropout it is 0."""
    WAIT_PV: int
    """Says where the softmax lets the previous product finish: 0 where ptxas puts it, 1 after the row maximum, 2 half
    way. With 3 it finishes before the softmax begins: then nothing overlaps inside a warpgroup."""
    BOUNDED: bool
    """Says whether a score bounds the logits so closely that one shift of the exponents serves a whole row."""
    REGISTERS: int
    """Counts the registers of a thread that attends."""
    QK_BITS: int = 16
    """Counts the bits of an entry of Q and K: 16, or 8 with a scale for each block."""
    PV_BITS: int = 16
    P_SCALE_LOG2: int = 0
    """Computes P as 2^P_SCALE_LOG2 P: e4m3 has most room there."""
    PROMOTE: str = "none"
    """Says whether P V of each key tile begins at zero and joins O in registers: "none" does not, "whole" does, and
    "halves" in two halves of its columns, before the next S. Sums of 8-bit products that stay in the tensor core drift
    with length."""
    SUM_BY_PRODUCT: bool = False
    """Says whether row sums are products of P with ones, and half of P's bits are computed without exponentials."""
    PAGE: int | None = None
    """Counts the rows of a page of a cache, 0 if it is contiguous; None where keys are in no cache."""
    V_PARTS: int = 1
    """Counts the parts of V's columns: a program computes one of D_V columns, so a tile of queries comes so often."""
    K_PIECES: int = 1
    """Counts the pieces of K's columns that each have stages of their own. Where K does not fit twice, the first pieces
    of the next tile come while the last of this one are multiplied."""
    LOCATE_EARLY: bool = False
    """Says whether the first tile is located while earlier kernels run: no tensor tells where it is."""


class Shape(NamedTuple):
    """Hold lengths and counts of a launch; for packed sequences, M and N count all rows."""

    M: object
    N: object
    d_v: object
    H: object
    group: object
    heads: object
    section: object
    tiles: object


class Shared(NamedTuple):
    """Hold everything in shared memory."""

    q: object
    """Its memory is one of each piece of the columns, as that of k and v."""
    o: object
    """Is the memory of q, through which O leaves, in O's type."""
    k: object
    """Has K_PIECES uses for each key tile."""
    v: object
    """Shares `empty` with k: it is complete for the last piece of key tile y when the products with K's y and V's y - 1
    are over."""
    tile_ids: object
    bits: object
    """Holds the channel of dropout bits, or None."""
    ones: object
    """Holds a tile of ones, which sums P's rows, or None."""


@gluon.jit
def counts_of(shape):
    """Return a launch's shape. It hands counts over as 2 n + 1 (see `odd` in host/arguments.py). With >> in place of
    //, ptxas spills where registers are short."""
    return Shape(
        shape.M // 2, shape.N // 2, shape.d_v // 2, shape.H // 2, shape.group // 2, shape.heads // 2,
        shape.section // 2, shape.tiles // 2,
    )  # fmt: skip


# not specialised on lengths, nor on what is counted from them
@gluon.jit(do_not_specialize=["codes", "packed", "cache", "unused", "shape", "variant"])
def attention_forward(
    Q, K, V, codes, O, O_rows, L, counter, packed, cache, unused, variant, c, shape, order: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """Compute O and L of every tile of queries. c turns logits into base 2, or is None (see `row_max`). `order` says
    which tile comes when: `schedule.assign` or the like."""
    WARPGROUPS: gl.constexpr = tile.WARPGROUPS
    B_C: gl.constexpr = tile.B_C
    Q_STAGES: gl.constexpr = tile.Q_STAGES
    KV_STAGES: gl.constexpr = tile.KV_STAGES
    DROPOUT_WARPS: gl.constexpr = tile.DROPOUT_WARPS
    REGISTERS: gl.constexpr = tile.REGISTERS
    shape = counts_of(shape)
    K_STAGES: gl.constexpr = KV_STAGES * tile.K_PIECES
    done = barriers(K_STAGES, WARPGROUPS)
    if tile.QK_BITS == 8:
        o = allocate(O, O.dtype, Q_STAGES * WARPGROUPS, 64, tile.D)
        q = (triton_compat.reinterpret(o[0], Q.dtype, [2 * Q_STAGES * WARPGROUPS, 1, 1, 64, tile.D], Q.layout),)
    else:
        q = allocate(Q, Q.dtype, Q_STAGES * WARPGROUPS, 64, tile.D)
        o = q
    ones: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, B_C], gl.float8e4nv)
    shared = Shared(
        Channel(q, barriers(Q_STAGES, 1), barriers(Q_STAGES, WARPGROUPS)),
        o,
        Channel(allocate(K, K.dtype, K_STAGES, B_C, tile.D // tile.K_PIECES), barriers(K_STAGES, 1), done),
        Channel(values(V, KV_STAGES, tile), barriers(KV_STAGES, 1), done),
        tile_channel(WARPGROUPS + 1 if DROPOUT_WARPS else WARPGROUPS),
        bits(64, WARPGROUPS, 1) if DROPOUT_WARPS else None,
        gl.allocate_shared_memory(gl.float8e4nv, [8, B_C], ones, ones_of(B_C)) if tile.SUM_BY_PRODUCT else None,
    )
    fence_async_shared()
    launch_dependents()
    if DROPOUT_WARPS:
        # four warpgroups divide 512 registers a thread, and three divide 504
        gl.static_assert(WARPGROUPS == 2)
        LEFT: gl.constexpr = (488 if DROPOUT_WARPS == 4 else 504) - 2 * REGISTERS
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (produce_bits, (shared, Call(shape, packed, variant, cache, order), tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, DROPOUT_WARPS, 1], [REGISTERS, LEFT, 24],
        )  # fmt: skip
    elif WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [1], [24],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (0, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (1, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (attend, (2, O, O_rows, L, shared, unused, Call(shape, packed, variant, cache, order), c, codes, tile)),
                (load, (Q, K, V, shared, counter, Call(shape, packed, variant, cache, order), codes, tile)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
