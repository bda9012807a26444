"""Before and after the backward's main kernel: what it reads of each row, and dQ as tensors have it.

dQ is summed in fp32, in blocks of B_R rows, in the order in which a warpgroup holds a 64 x 64 piece of a product in its
registers: each piece is 4096 numbers in a row. Row values lie in the same blocks, one number a row.
"""

import triton
import triton.language as tl

from ...tile.rows import fill_unowned, origin, row_values, rows_of
from ...tile.softmax import for_backward


@triton.jit
def first_block(packed, b, h, H, q0, stride, B_R: tl.constexpr):
    """The first block of head h of batch entry b; `stride` blocks a head, or a head of all packed sequences."""
    if packed is None:
        return (b * H + h) * stride
    else:
        return h * stride + q0 // B_R + b  # each sequence wastes less than one block


@triton.jit(do_not_specialize=["packed", "unowned", "M", "H", "tiles", "stride", "group", "zeroed"])
def prepare(
    O, dO, dL, lse, L, D, dQ, ready, done, packed, unowned, M, H, tiles, stride, group, zeroed,
    d_v: tl.constexpr, B_R: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """L, the lse in base 2; D = rowsum(dO * O) - dL; zeros in `ready` and `done`, in dQ of the first `zeroed` matrices,
    and in rows of gradients that no sequence owns. Past the last row P = exp2(S - L) must vanish. The next kernel may
    begin, and waits for this one itself.
    """
    tl.extra.cuda.gdc_launch_dependents()
    fill_unowned(unowned, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    # the main kernel begins with the first matrix: what it reads first is written last, and still in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * ROWS >= tl.cdiv(M, B_R) * B_R:
        return
    rows = t * ROWS + tl.arange(0, ROWS)
    entries = tl.arange(0, SIZE)
    inside = (rows < M)[:, None] & (entries < d_v)[None, :]
    at = rows.to(tl.int64)[:, None]
    o = tl.load(origin(O, b, h, q0) + at * O.row + entries[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(origin(dO, b, h, q0) + at * dO.row + entries[None, :], mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(o * do, 1)
    if dL is not None:
        sums -= tl.load(row_values(dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
    logs = tl.load(row_values(lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=float("inf"))
    first = first_block(packed, b, h, H, q0, stride, B_R).to(tl.int64) * B_R
    tl.store(L + first + rows, for_backward(logs, False))
    tl.store(D + first + rows, sums)
    walk = (b * H + h) // group
    if ready is not None:
        tl.store(ready + walk, 0, mask=t == 0)
    tl.store(done + b * H + h, 0, mask=t == 0)
    at = (first + t.to(tl.int64) * ROWS) * SIZE + tl.arange(0, ROWS)[:, None] * SIZE + entries[None, :]
    tl.store(dQ + at, tl.zeros([ROWS, SIZE], tl.float32), mask=b * H + h < zeroed)


@triton.jit
def count_at(at):
    """A count that others raise; what they wrote before can be read after."""
    PTX: tl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
    return tl.inline_asm_elementwise(PTX, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def doze():
    """A tenth of a microsecond, so that who waits takes no bandwidth from those who work."""
    PTX: tl.constexpr = "nanosleep.u32 100; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(PTX, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["packed", "M", "N", "H", "tiles", "key_tiles", "stride", "group"])
def finish(
    sums, dQ, done, packed, factor, M, N, H, tiles, key_tiles, stride, group,
    d: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """dQ = factor * sums: one piece a program, from register order back to rows. It begins before the main kernel has
    ended, on processors that have nothing left to do there, and waits for the tiles of keys that add to it. Its last
    program ends after that kernel, for whoever comes next."""
    program = tl.program_id(0)
    t, h, b = tiles - 1 - program % tiles, program // tiles % H, program // tiles // H
    q0, M, _, N = rows_of(packed, b, M, N)
    PIECES: tl.constexpr = SIZE // 64
    row, column = t // PIECES * 64, t % PIECES * 64
    count = tl.minimum(tl.cdiv(N, B_C), key_tiles)
    if (count == 0) | (program == tl.num_programs(0) - 1):
        tl.extra.cuda.gdc_wait()
    if row >= M:
        return
    while count_at(done + b * H + h // group * group) < count:
        doze()
    first = first_block(packed, b, h, H, q0, stride, B_R).to(tl.int64) * B_R * SIZE
    x = tl.load(sums + first + t.to(tl.int64) * 4096 + tl.arange(0, 4096))
    x = x.reshape([8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, 64])
    rows, entries = row + tl.arange(0, 64), column + tl.arange(0, 64)
    at = origin(dQ, b, h, q0) + rows.to(tl.int64)[:, None] * dQ.row + entries[None, :]
    inside = (rows < M)[:, None] & (entries < d)[None, :]
    tl.store(at, (x * factor).to(dQ.ptr.dtype.element_ty), mask=inside)
