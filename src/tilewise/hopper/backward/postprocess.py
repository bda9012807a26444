"""Postprocess after the backward's main kernel: convert sums, in the blocks of tile/rows.py, into dQ."""

import triton
import triton.language as tl

from ...tile.rows import first_block, origin, rows_of


@triton.jit
def load_acquire(at):
    """Read a count that others raise; what they wrote before can be read after."""
    PTX: tl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
    return tl.inline_asm_elementwise(PTX, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sleep():
    """Sleep a tenth of a microsecond, so that waiting takes no bandwidth from programs that work."""
    PTX: tl.constexpr = "nanosleep.u32 100; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["packed", "M", "N", "H", "tiles", "key_tiles", "stride", "group"])
def attention_backward_postprocess(
    dq_accum, dQ, done, packed, factor, M, N, H, tiles, key_tiles, stride, group,
    d: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute dQ = factor * sums: one block a program, from register order back to rows. It begins before the main
    kernel has ended, on multiprocessors that are idle by then. It waits for the key tiles that add to its
    block. Its last program ends after the main kernel, for the sake of the kernels that follow. Where the last block of
    a row has fewer columns, a program has all of them."""
    program = tl.program_id(0)
    t, h, b = tiles - 1 - program % tiles, program // tiles % H, program // tiles // H
    q0, M, _, N = rows_of(packed, b, M, N)
    BLOCKS: tl.constexpr = 1 if SIZE % 64 else SIZE // 64
    row, column = t // BLOCKS * 64, t % BLOCKS * 64
    count = tl.minimum(tl.cdiv(N, B_C), key_tiles)
    if (count == 0) | (program == tl.num_programs(0) - 1):
        tl.extra.cuda.gdc_wait()
    if row >= M:
        return
    while load_acquire(done + b * H + h // group * group) < count:
        sleep()
    first = first_block(packed, b, h, H, q0, stride, B_R).to(tl.int64) * B_R * SIZE
    block = dq_accum + first + t.to(tl.int64) * (64 * SIZE // BLOCKS)
    if SIZE % 64 == 0:
        store_block(dQ, block, factor, b, h, q0, M, row, column, d, 64)
    else:
        for n in tl.static_range(SIZE // 64):
            store_block(dQ, block + 4096 * n, factor, b, h, q0, M, row, 64 * n, d, 64)
        store_block(dQ, block + SIZE // 64 * 4096, factor, b, h, q0, M, row, SIZE // 64 * 64, d, SIZE % 64)


@triton.jit
def store_block(dQ, block, factor, b, h, q0, M, row, column, d: tl.constexpr, COLUMNS: tl.constexpr):
    """Store 64 rows of dQ."""
    x = tl.load(block + tl.arange(0, 64 * COLUMNS))
    x = x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, COLUMNS])
    rows, entries = row + tl.arange(0, 64), column + tl.arange(0, COLUMNS)
    at = origin(dQ, b, h, q0) + rows.to(tl.int64)[:, None] * dQ.row + entries[None, :]
    inside = (rows < M)[:, None] & (entries < d)[None, :]
    tl.store(at, (x * factor).to(dQ.ptr.dtype.element_ty), mask=inside)
