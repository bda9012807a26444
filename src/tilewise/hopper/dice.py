"""Dropout's decisions as bits in shared memory: a role of its own rolls them, ahead of those that multiply.

Ten rounds of Philox for four entries are more instructions than a softmax takes. Between two waits of a warpgroup
nothing runs beside them; in other warps they run beside everything. The bits of 64 rows of a tile are two words for
each thread of a warpgroup, one for each of the two rows that it holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait

AHEAD = gl.constexpr(4)
"""Tiles by which the dice may be ahead."""


@gluon.jit
def bits(USES: gl.constexpr, READERS: gl.constexpr):
    """Their channel: so many uses for each tile, each read by so many warpgroups."""
    STAGES: gl.constexpr = AHEAD * USES
    memory = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return Channel(memory, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def philox(seed, c0, c1, c2, c3):
    """Philox-4x32-10 (Salmon et al. 2011): four words from a 64-bit key and four counters, all uint32.

    Triton's own multiplies once for each half of a product; here one wide multiplication gives both.
    """
    k0, k1 = seed.to(gl.uint32), (seed >> 32).to(gl.uint32)
    for _ in gl.static_range(10):
        x, y = c0.to(gl.uint64) * 0xD2511F53, c2.to(gl.uint64) * 0xCD9E8D57
        c0, c1 = (y >> 32).to(gl.uint32) ^ c1 ^ k0, y.to(gl.uint32)
        c2, c3 = (x >> 32).to(gl.uint32) ^ c3 ^ k1, x.to(gl.uint32)
        k0, k1 = add(k0, 0x9E3779B9), add(k1, 0xBB67AE85)
    return c0, c1, c2, c3


@gluon.jit
def add(a, b):
    """Modulo 2^32."""
    return gl.add(a, b, sanitize_overflow=False)


@gluon.jit
def rolled(seed, threshold, matrix, i0, j0, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, WARPS: gl.constexpr):
    """The bits of score matrix `matrix` = b H + h, bit for bit those of reference.dropout_keep: of 64 queries from i0
    on and so many keys from j0 on, or TRANSPOSED of 64 keys and so many queries.

    A counter decides four entries, 8 apart in both directions. So there are 32 x COLUMNS / 2 of them, and they lie such
    that a thread has all that decide the entries of one thread of the tile.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, layout))[None, :]
    if TRANSPOSED:
        c_i, c_j = (i0 >> 1) + column, (j0 >> 1) + row
    else:
        c_i, c_j = (i0 >> 1) + row, (j0 >> 1) + column
    zero = 0 * (row + column)
    c_i, c_j, c_row = (c_i + zero).to(gl.uint32), (c_j + zero).to(gl.uint32), (matrix + zero).to(gl.uint32)
    w0, w1, w2, w3 = philox(seed, c_j, c_i, c_row, zero.to(gl.uint32))
    if TRANSPOSED:
        w1, w2 = w2, w1
    above, below = packed(w0, w1, threshold, column), packed(w2, w3, threshold, column)
    return gl.join(above, below).reshape([4, 8, 4, 2]).permute((0, 3, 1, 2)).reshape([64, 4])


@gluon.jit
def packed(left, right, threshold, column):
    """Two words of every counter as bits; they decide columns 8 apart. A word holds those of one row and thread.

    The thread has a pair of entries in each block of 8 columns: of block b entry e is bit 7 - b % 8 of byte
    2 (b / 8) + e, where `kept` can reach it.
    """
    ROWS: gl.constexpr = left.shape[0]
    BLOCKS: gl.constexpr = left.shape[1] // 8
    at = (column >> 5) * 16 + (column & 1) * 8 + 7 - (column >> 3 & 3) * 2
    kept = ((left >= threshold).to(gl.int32) << at) + ((right >= threshold).to(gl.int32) << at - 1)
    return gl.sum(gl.sum(kept.reshape([ROWS, BLOCKS, 4, 2]), 3), 1)


@gluon.jit
def by_thread(S):
    """A tile of S as (row, block of 8 columns, thread, entry)."""
    return S.reshape([S.shape[0], S.shape[1] // 8, 4, 2])


@gluon.jit
def taken(bits, u, S):
    """Use u: the words of every row and thread of a tile that lies as S does."""
    layout: gl.constexpr = by_thread(S).type.layout
    wait(bits.full, u)
    words = stage(bits.memory, u).load(gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    arrive(bits.empty, u)
    return words


@gluon.jit
def kept(x, words):
    """x where its bit is set, else 0. One instruction, prmt, spreads the topmost bits of two bytes over the mask of a
    pair of 16-bit numbers, or of one byte over that of a 32-bit number."""
    tile = by_thread(x)
    layout: gl.constexpr = tile.type.layout
    b = gl.arange(0, tile.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    b = b[None, :, None, None]
    lifted = words[:, None, :, None] << (b & 7)
    if x.dtype.primitive_bitwidth == 16:
        tile = gl.inline_asm_elementwise(
            "{.reg .b32 mask; prmt.b32 mask, $2, 0, $4; and.b32 $0, $1, mask;}",
            "=r,r,r,r,r,r", [tile, lifted, gl.where(b < 8, 0x9988, 0xBBAA)],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
        tile = gl.inline_asm_elementwise(
            "{.reg .b32 mask; prmt.b32 mask, $2, 0, $3; and.b32 $0, $1, mask;}",
            "=r,r,r,r", [tile, lifted, gl.where(b < 8, 0x8888, 0xAAAA) + 0x1111 * e],
            dtype=x.dtype, is_pure=True, pack=1,
        )  # fmt: skip
    return gl.convert_layout(tile.reshape(x.shape), x.type.layout, assert_trivial=True)
