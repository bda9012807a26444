"""Generate dropout mask bits in shared memory, in separate warps, before the warps that multiply need them.

Ten rounds of Philox take 20 wide multiplications, for sixteen entries of a tile. In a warpgroup that multiplies,
nothing would run between two waits to hide them. In other warps they overlap with everything.

A thread of a warpgroup holds two rows of a tile, 8 apart, and two adjacent columns in every 8. A 32-bit word has its
bits of 64 columns:

    byte 0    upper row, even blocks of 8 columns    two bits for each 16 columns, from the topmost bit on
    byte 1    upper row, odd blocks
    byte 2    lower row, even blocks
    byte 3    lower row, odd blocks

In shared memory, words are ordered by half of the columns. The halves of 64 columns lie in two words, half empty, which
the reader joins.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait
from .threads import as_tile

TILES_AHEAD = gl.constexpr(4)
"""Limits by how many tiles dropout bits may be early."""


@gluon.jit
def bits(ROWS: gl.constexpr, USES: gl.constexpr, READERS: gl.constexpr):
    """Allocate the channel of dropout bits: USES uses per tile, each of ROWS rows and read by READERS warpgroups."""
    STAGES: gl.constexpr = TILES_AHEAD * USES
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    memory = gl.allocate_shared_memory(gl.uint32, [STAGES, 2, ROWS // 16, 8, 4], layout)
    return Channel(memory, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def philox(seed, c0, c1, c2, c3):
    """Compute Philox-4x32-10 (Salmon et al. 2011): four words from a 64-bit key and four counters, all uint32.

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
    """Add modulo 2^32."""
    return gl.add(a, b, sanitize_overflow=False)


@gluon.jit
def in_whole(counters, place, i0, j0):
    """Return the score matrix, first row and first column of a tile as dropout counts them: in the whole, of which the
    call may be a part."""
    if len(counters) == 0:
        return place.matrix, i0, j0
    else:
        matrix = (counters.matrix >> 1) + place.b * (counters.of_heads >> 1) + place.h
        return matrix, i0 + (counters.row >> 1), j0 + (counters.column >> 1)


@gluon.jit
def dropout_words(
    seed, threshold, matrix, i0, j0, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Generate the words of score matrix `matrix` = b H + h, bit for bit as dropout.dropout_keep. Rows are queries
    from i0 on and columns keys from j0 on, or TRANSPOSED the other way round. The result is (half of the columns, 16
    rows, row of 8, thread).

    A counter decides two queries, 8 apart, of eight keys, 8 apart: a word of four bytes for each 16 keys. A thread has
    all counters that decide the entries of one thread of the tile, and TRANSPOSED of those 16, 32 and 48 rows below. i0
    is a multiple of 16, j0 of 64.
    """
    if TRANSPOSED:
        # one step after the other: ptxas would begin with every counter at once, and two warps have few registers
        words = words_by_key(seed, threshold, matrix, i0, j0, COLUMNS // 32 - 1, ROWS, COLUMNS, WARPS)
        for done in range(1, COLUMNS // 32):
            step = COLUMNS // 32 - 1 - done
            words = words >> 2 | words_by_key(seed, threshold, matrix, i0, j0, step, ROWS, COLUMNS, WARPS)
        return words
    else:
        return words_by_query(seed, threshold, matrix, i0, j0, ROWS, COLUMNS, WARPS)


@gluon.jit
def words_by_query(
    seed, threshold, matrix, i0, j0, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Generate the words of `dropout_words` where rows are queries: of 128 columns each half has its own counters."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS // 2, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, layout))[None, :]
    w0, w1, w2, w3 = keep_bits(seed, threshold, matrix, (i0 >> 1) + row, (j0 >> 3) + column, column & 1)
    if COLUMNS == 128:
        words = w0 | w1 >> 2 | w2 >> 4 | w3 >> 6
        return gl.sum(words.reshape([ROWS // 16, 8, 2, 4, 2]), 4).permute((2, 0, 1, 3))
    else:
        words = gl.join(w0 | w1 >> 2, w2 | w3 >> 2)
        return gl.sum(words.reshape([ROWS // 16, 8, 4, 2, 2]), 3).permute((3, 0, 1, 2))


@gluon.jit
def words_by_key(
    seed, threshold, matrix, i0, j0, step, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Generate what 16 columns of each half add to the words of `dropout_words` where rows are keys, in front of the
    next step's bits."""
    ABOVE: gl.constexpr = min(WARPS, ROWS // 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [ABOVE, WARPS // ABOVE], [1, 0])
    row = gl.arange(0, ROWS // 8, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    c_i = (i0 >> 1) + 8 * step + (column >> 3) * (COLUMNS // 4) + (column & 7)
    w0, w1, w2, w3 = keep_bits(seed, threshold, matrix, c_i, (j0 >> 3) + row, column & 1)
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # each has other 16 rows
    words = gl.sum(words.reshape([ROWS // 64, 8, 2, 4, 2, 2, 2]), 4)
    words = words.permute((2, 0, 4, 5, 1, 3)).reshape([2, ROWS // 16, 8, 4])
    return words & 0xFF0000FF | words << 8 & 0xFF0000 | words >> 8 & 0xFF00  # bytes by query come by row


@gluon.jit
def keep_bits(seed, threshold, matrix, c_i, c_j, entry):
    """Decide the entries of each counter, in four words. Where an entry is kept, the topmost bit of a byte is set, or
    the bit below for a pair's second `entry`."""
    zero = 0 * (c_i + c_j)
    c_i, c_j, c_row = (c_i + zero).to(gl.uint32), (c_j + zero).to(gl.uint32), (matrix + zero).to(gl.uint32)
    w0, w1, w2, w3 = philox(seed, c_j, c_i, c_row, zero.to(gl.uint32))
    upper, lower = (threshold >> 8) * 0x01010101, (threshold & 0xFF) * 0x01010101
    borrow = (at_least(w0 ^ w1 ^ w2 ^ w3, lower, 0) ^ 0x80808080) >> 7
    entry = (entry + zero).to(gl.uint32)
    return (
        at_least(w0, upper, borrow) >> entry, at_least(w1, upper, borrow) >> entry,
        at_least(w2, upper, borrow) >> entry, at_least(w3, upper, borrow) >> entry,
    )  # fmt: skip


@gluon.jit
def at_least(x, y, borrow):
    """Compare four bytes each: x >= y + borrow, as the topmost bit. Subtraction compares the lower seven bits; the
    topmost bit of x, set, keeps it inside the byte."""
    low = (x | 0x80808080) - ((y & 0x7F7F7F7F) + borrow)
    return (x & ~y | ~(x ^ y) & low) & 0x80808080


@gluon.jit
def read_bits(bits, u, ROW: gl.constexpr, S):
    """Read use u's words of a tile that lies as S does, from row ROW on; return 0 without dropout."""
    if bits is None:
        return 0
    else:
        layout: gl.constexpr = by_word(S).type.layout
        wait(bits.full, u)
        memory = stage(bits.memory, u).slice(ROW // 16, S.shape[0] // 16, 1)
        words = memory.slice(0, S.shape[1] // 64, 0).load(gl.SliceLayout(4, layout))
        if S.shape[1] == 64:
            words |= memory.slice(1, 1, 0).load(gl.SliceLayout(4, layout)) >> 4
        arrive(bits.empty, u)
        return words


@gluon.jit
def by_word(S):
    """Reshape a tile of S into (64 columns, 16 rows, row of 8, thread, entry). A word's 32 entries are counted by upper
    or lower row, 16 columns, even or odd 8 of them, and place in a pair."""
    ROWS: gl.constexpr = S.shape[0] // 16
    WORDS: gl.constexpr = S.shape[1] // 64
    S = S.reshape([ROWS, 2, 8, WORDS, 4, 2, 4, 2]).permute((3, 0, 2, 6, 1, 4, 5, 7))
    return S.reshape([WORDS, ROWS, 8, 4, 32])


@gluon.jit
def from_words(x, S):
    """Undo `by_word`."""
    x = x.reshape([S.shape[1] // 64, S.shape[0] // 16, 8, 4, 2, 4, 2, 2]).permute((1, 4, 2, 0, 5, 6, 3, 7))
    return as_tile(x, S)


@gluon.jit
def apply_dropout(x, words, variant):
    """Return x after dropout, before its factor."""
    if variant.dropout is None:
        return x
    else:
        return apply_bits(x, words)


@gluon.jit
def apply_bits(x, words):
    """Return x where its bit is set, else 0. One instruction, prmt, spreads the topmost bits of two words' bytes over
    the mask of a pair of 16-bit numbers. For a 32-bit number it spreads that of one."""
    tile = by_word(x)
    layout: gl.constexpr = tile.type.layout
    entries: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    n = gl.arange(0, 32, entries)[None, None, None, None, :]
    byte, bit = 2 * (n >> 4) + (n >> 1 & 1), 2 * (n >> 2 & 3) + (n & 1)
    lifted = words[:, :, :, :, None] << bit.to(gl.uint32)
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
