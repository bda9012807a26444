"""Dropout's decisions as bits in shared memory: a role of its own rolls them, ahead of those that multiply.

Ten rounds of Philox are 20 wide multiplications, for eight entries of a tile. Between two waits of a warpgroup nothing
runs beside them; in other warps they run beside everything. The bits of 64 rows of a tile are two words for each thread
of a warpgroup, one for each of the two rows that it holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .channel import Channel, arrive, barriers, stage, wait
from .threads import as_tile, by_thread

AHEAD = gl.constexpr(4)
"""Tiles by which the dice may be ahead."""


@gluon.jit
def bits(ROWS: gl.constexpr, USES: gl.constexpr, READERS: gl.constexpr):
    """Their channel: so many uses for each tile, each of so many rows and read by so many warpgroups."""
    STAGES: gl.constexpr = AHEAD * USES
    memory = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
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
    """The bits of score matrix `matrix` = b H + h, bit for bit those of reference.dropout_keep: rows are queries from
    i0 on and columns keys from j0 on, or TRANSPOSED the other way round. The threshold stands in the upper 16 bits.

    Two warps that roll in the backward have registers for a few counters at a time, and ptxas would begin with all:
    they go through the columns in steps, the last first, and make room in the words for those before.
    """
    STEP: gl.constexpr = 16 if TRANSPOSED and WARPS == 2 else COLUMNS
    gl.static_assert(STEP == COLUMNS or COLUMNS <= 64)  # at 64, the words of all blocks are one shift apart
    words = step(seed, threshold, matrix, i0, j0, COLUMNS - STEP, ROWS, STEP, TRANSPOSED, WARPS)
    for done in range(STEP, COLUMNS, STEP):
        first = COLUMNS - STEP - done
        words >>= STEP // 8
        words += step(seed, threshold, matrix, i0, j0, first, ROWS, STEP, TRANSPOSED, WARPS)
    return words


@gluon.jit
def step(
    seed, threshold, matrix, i0, j0, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The same of so many columns from `first` on, as if they began with block 0. j0 is a multiple of 32.

    A counter decides eight entries: two queries, 8 apart, of four keys, 8 apart. Counters lie such that a thread has
    all that decide the entries of one thread of the tile, and TRANSPOSED also those of the thread 16 rows below.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    if TRANSPOSED:
        row = gl.arange(0, ROWS // 4, row_layout)[:, None]
        column = gl.arange(0, COLUMNS // 2, column_layout)[None, :]
        c_i, c_j = (i0 + first >> 1) + column, (j0 >> 2) + row
    else:
        row = gl.arange(0, ROWS // 2, row_layout)[:, None]
        column = gl.arange(0, COLUMNS // 4, column_layout)[None, :]
        c_i, c_j = (i0 >> 1) + row, (j0 + first >> 2) + column
    zero = 0 * (row + column)
    c_i, c_j, c_row = (c_i + zero).to(gl.uint32), (c_j + zero).to(gl.uint32), (matrix + zero).to(gl.uint32)
    w0, w1, w2, w3 = philox(seed, c_j, c_i, c_row, zero.to(gl.uint32))
    low0, low1, low2, low3 = w0 << 16, w1 << 16, w2 << 16, w3 << 16  # the topmost 16 bits decide
    if TRANSPOSED:
        above = gl.join(packed((low0, low2), threshold, column), packed((w0, w2), threshold, column))
        below = gl.join(packed((low1, low3), threshold, column), packed((w1, w3), threshold, column))
        return gl.join(above, below).reshape([ROWS // 32, 8, 4, 2, 2]).permute((0, 3, 4, 1, 2)).reshape([ROWS, 4])
    else:
        above = packed((low0, low1, w0, w1), threshold, column)
        below = packed((low2, low3, w2, w3), threshold, column)
        return gl.join(above, below).reshape([ROWS // 16, 8, 4, 2]).permute((0, 3, 1, 2)).reshape([ROWS, 4])


@gluon.jit
def packed(numbers, threshold, column):
    """What every counter decides of a row, as bits; its numbers are of columns 8 apart. A word holds those of one row
    and thread.

    The thread has a pair of entries in each block of 8 columns: of block b entry e is bit 7 - b % 8 of byte
    2 (b / 8) + e, where `kept` can reach it.
    """
    EACH: gl.constexpr = len(numbers)
    ROWS: gl.constexpr = numbers[0].shape[0]
    GROUPS: gl.constexpr = numbers[0].shape[1] // 8
    kept = gl.zeros_like(numbers[0]).to(gl.int32)
    for n in gl.static_range(EACH):
        kept = compared(kept, numbers[n], threshold)
    b = (column >> 3) * EACH + EACH - 1  # the last block's bit is the lowest
    kept <<= (b >> 3) * 16 + (column & 1) * 8 + 7 - (b & 7)
    return gl.sum(gl.sum(kept.reshape([ROWS, GROUPS, 4, 2]), 3), 1)


@gluon.jit
def compared(kept, number, threshold):
    """2 kept + (number >= threshold), in two instructions: the second, kept - (~kept + borrow), takes the borrow that
    the first leaves."""
    return gl.inline_asm_elementwise(
        "{.reg .u32 x; sub.cc.u32 x, $2, $3; not.b32 x, $1; subc.u32 $0, $1, x;}",
        "=r,r,r,r", [kept, number, threshold], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def taken(bits, u, ROW: gl.constexpr, S):
    """Of use u, the words of every row and thread of a tile that lies as S does, from row ROW on; 0 without dropout."""
    if bits is None:
        return 0
    else:
        layout: gl.constexpr = by_thread(S).type.layout
        wait(bits.full, u)
        memory = stage(bits.memory, u).slice(ROW, S.shape[0], 0)
        words = memory.load(gl.SliceLayout(1, gl.SliceLayout(3, layout)))
        arrive(bits.empty, u)
        return words


@gluon.jit
def dropped(x, words, variant):
    """x after dropout, before its factor."""
    if variant.dropout is None:
        return x
    else:
        return kept(x, words)


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
    return as_tile(tile, x)
