"""Dropout's decisions as bits in shared memory: a role of its own rolls them, ahead of those that multiply.

Ten rounds of Philox are 20 wide multiplications, for sixteen entries of a tile. Between two waits of a warpgroup nothing
runs beside them; in other warps they run beside everything.

Of a tile, a word decides 2 x 2 entries in each byte: rows 8 apart, and columns 8 apart. A thread of a warpgroup holds two
rows of 16, and a pair of neighbours in every 8 columns; so two words, one for each half of the columns, are all it reads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait
from .threads import as_tile

AHEAD = gl.constexpr(4)
"""Tiles by which the dice may be ahead."""


@gluon.jit
def bits(ROWS: gl.constexpr, USES: gl.constexpr, READERS: gl.constexpr):
    """Their channel: so many uses for each tile, each of so many rows and read by so many warpgroups."""
    STAGES: gl.constexpr = AHEAD * USES
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    memory = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS // 16, 8, 4, 2], layout)
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
def rolled(
    seed, threshold, matrix, i0, j0, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The words of score matrix `matrix` = b H + h, bit for bit those of reference.dropout_keep: rows are queries from
    i0 on and columns keys from j0 on, or TRANSPOSED the other way round. By (16 rows, row, thread, half of the columns).

    A counter decides two queries, 8 apart, of eight keys, 8 apart: as a word of four bytes for each 16 keys. Counters lie
    such that a thread has all that decide the entries of one thread of the tile, and TRANSPOSED of the threads 16, 32
    and 48 rows below.
    """
    if TRANSPOSED:
        # one step after the other: ptxas would begin with every counter at once, and two warps have few registers
        words = of_keys(seed, threshold, matrix, i0, j0, COLUMNS // 32 - 1, ROWS, COLUMNS, WARPS)
        for done in range(1, COLUMNS // 32):
            step = COLUMNS // 32 - 1 - done
            words = words >> 2 | of_keys(seed, threshold, matrix, i0, j0, step, ROWS, COLUMNS, WARPS)
        return words
    else:
        return of_queries(seed, threshold, matrix, i0, j0, ROWS, COLUMNS, WARPS)


@gluon.jit
def of_queries(
    seed, threshold, matrix, i0, j0, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The words of `rolled` where rows are queries: of 128 columns each half has its own counters."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS // 2, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, layout))[None, :]
    w0, w1, w2, w3 = decided(seed, threshold, matrix, (i0 >> 1) + row, (j0 >> 3) + column, column & 1)
    if COLUMNS == 128:
        words = w0 | w1 >> 2 | w2 >> 4 | w3 >> 6
        return gl.sum(words.reshape([ROWS // 16, 8, 2, 4, 2]), 4).permute((0, 1, 3, 2))
    else:
        words = gl.join(w0 | w1 >> 2, w2 | w3 >> 2)
        return gl.sum(words.reshape([ROWS // 16, 8, 4, 2, 2]), 3)


@gluon.jit
def of_keys(
    seed, threshold, matrix, i0, j0, step, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """What 16 columns of each half add to the words of `rolled` where rows are keys, in front of the next step's."""
    ABOVE: gl.constexpr = min(WARPS, ROWS // 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [ABOVE, WARPS // ABOVE], [1, 0])
    row = gl.arange(0, ROWS // 8, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    c_i = (i0 >> 1) + 8 * step + (column >> 3) * (COLUMNS // 4) + (column & 7)
    w0, w1, w2, w3 = decided(seed, threshold, matrix, c_i, (j0 >> 3) + row, column & 1)
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # each of other 16 rows
    words = gl.sum(words.reshape([ROWS // 64, 8, 2, 4, 2, 2, 2]), 4)
    words = words.permute((0, 4, 5, 1, 3, 2)).reshape([ROWS // 16, 8, 4, 2])
    return words & 0xFF0000FF | words << 8 & 0xFF0000 | words >> 8 & 0xFF00  # bytes by query come by row


@gluon.jit
def decided(seed, threshold, matrix, c_i, c_j, place):
    """What counters decide, four words each: the topmost bit of a byte, or the one `place` lower, is set where its entry
    is kept."""
    zero = 0 * (c_i + c_j)
    c_i, c_j, c_row = (c_i + zero).to(gl.uint32), (c_j + zero).to(gl.uint32), (matrix + zero).to(gl.uint32)
    w0, w1, w2, w3 = philox(seed, c_j, c_i, c_row, zero.to(gl.uint32))
    upper, lower = (threshold >> 8) * 0x01010101, (threshold & 0xFF) * 0x01010101
    borrow = (at_least(w0 ^ w1 ^ w2 ^ w3, lower, 0) ^ 0x80808080) >> 7
    place = (place + zero).to(gl.uint32)
    return (
        at_least(w0, upper, borrow) >> place, at_least(w1, upper, borrow) >> place,
        at_least(w2, upper, borrow) >> place, at_least(w3, upper, borrow) >> place,
    )  # fmt: skip


@gluon.jit
def at_least(x, y, borrow):
    """Of four bytes each: x >= y + borrow, as the topmost bit. The lower seven bits are compared by subtracting, which
    the topmost bit of x, set, keeps inside the byte."""
    low = (x | 0x80808080) - ((y & 0x7F7F7F7F) + borrow)
    return (x & ~y | ~(x ^ y) & low) & 0x80808080


@gluon.jit
def taken(bits, u, ROW: gl.constexpr, S):
    """Of use u, the words of a tile that lies as S does, from row ROW on; 0 without dropout."""
    if bits is None:
        return 0
    else:
        layout: gl.constexpr = by_word(S).type.layout
        wait(bits.full, u)
        memory = stage(bits.memory, u).slice(ROW // 16, S.shape[0] // 16, 0)
        words = memory.load(gl.SliceLayout(4, layout))
        arrive(bits.empty, u)
        return words


@gluon.jit
def by_word(S):
    """A tile of S as (16 rows, row of 8, thread, half of the columns, entry): the last counts a word's entries, by lower
    or upper 8 rows, 16 columns, left or right 8 columns, and place in a pair."""
    STEPS: gl.constexpr = S.shape[1] // 32
    S = S.reshape([S.shape[0] // 16, 2, 8, 2, STEPS, 2, 4, 2]).permute((0, 2, 6, 3, 1, 4, 5, 7))
    return S.reshape([S.shape[0], 8, 4, 2, 8 * STEPS])


@gluon.jit
def from_words(x, S):
    """Undoes `by_word`."""
    STEPS: gl.constexpr = S.shape[1] // 32
    x = x.reshape([S.shape[0] // 16, 8, 4, 2, 2, STEPS, 2, 2]).permute((0, 4, 1, 3, 5, 6, 2, 7))
    return as_tile(x, S)


@gluon.jit
def dropped(x, words, variant):
    """x after dropout, before its factor."""
    if variant.dropout is None:
        return x
    else:
        return kept(x, words)


@gluon.jit
def kept(x, words):
    """x where its bit is set, else 0. One instruction, prmt, spreads the topmost bits of two words' bytes over the mask
    of a pair of 16-bit numbers, or that of one over the mask of a 32-bit number."""
    tile = by_word(x)
    layout: gl.constexpr = tile.type.layout
    entries: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    n = gl.arange(0, tile.shape[4], entries)
    byte = 2 * (n * 2 // tile.shape[4]) + (n >> 1 & 1)
    byte = byte[None, None, None, None, :]
    bit = 2 * ((n >> 2) % (tile.shape[4] // 8)) + (n & 1)
    lifted = words[:, :, :, :, None] << bit.to(gl.uint32)[None, None, None, None, :]
    if x.dtype.primitive_bitwidth == 16:
        tile = gl.inline_asm_elementwise(
            "{.reg .b32 mask; prmt.b32 mask, $2, $3, $4; and.b32 $0, $1, mask;}",
            "=r,r,r,r,r,r", [tile, lifted, 0xCC88 + 0x1111 * byte], dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        tile = gl.inline_asm_elementwise(
            "{.reg .b32 mask; prmt.b32 mask, $2, 0, $3; and.b32 $0, $1, mask;}",
            "=r,r,r,r", [tile, lifted, 0x8888 + 0x1111 * byte], dtype=x.dtype, is_pure=True, pack=1,
        )  # fmt: skip
    return from_words(tile, x)
