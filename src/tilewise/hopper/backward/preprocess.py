"""Preprocess before the backward's main kernel: compute what it reads of each row, in the blocks of
tile/rows.py."""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.rows import fill_unused, first_block, origin, row_values, rows_of
from ...tile.scores import finite
from ...tile.softmax import for_backward


class Tile(NamedTuple):
    """Hold what the kernel is compiled for; all are constants."""

    d_v: int
    B_R: int
    ROWS: int
    """Counts the rows of a program."""
    WIDTH: int
    """Counts the columns of a row of O, as a power of two."""
    SIZE: int
    """Counts those of a row of dQ."""


@triton.jit(do_not_specialize=["packed", "unused", "M", "H", "tiles", "stride", "group", "zeroed", "semaphores"])
def attention_backward_preprocess(
    O, dO, dL, lse, scratch, packed, unused, M, H, tiles, stride, group, zeroed, semaphores, tile: tl.constexpr
):  # fmt: skip
    """Compute the lse in base 2, and delta = rowsum(dO * O) - dL. Zero `ready`, `done`, dQ of the first `zeroed`
    matrices, so many `semaphores`, in place of the GQA sums, and rows of gradients that no sequence owns. Past the last
    row P = exp2(S - L) must vanish. The next kernel may begin, and waits for this one itself."""
    tl.extra.cuda.gdc_launch_dependents()
    B_R: tl.constexpr = tile.B_R
    ROWS: tl.constexpr = tile.ROWS
    WIDTH: tl.constexpr = tile.WIDTH
    SIZE: tl.constexpr = tile.SIZE
    STEP: tl.constexpr = WIDTH if SIZE % WIDTH == 0 else 64 if SIZE % 64 == 0 else 32
    fill_unused(unused, packed, tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :])
    for first in range(tl.program_id(0).to(tl.int64) * 256, semaphores, tl.num_programs(0).to(tl.int64) * 256):
        n = first + tl.arange(0, 256)
        tl.store(scratch.gqa_sums + n, 0, mask=n < semaphores)
    # the main kernel begins with the first matrix: what it reads first is written last, and still in the cache
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    t, h, b = program % tiles, program // tiles % H, program // tiles // H
    rows_in_all = M
    q0, M, _, _ = rows_of(packed, b, M, 0)
    if t * ROWS >= tl.cdiv(M, B_R) * B_R:
        return
    rows = t * ROWS + tl.arange(0, ROWS)
    entries = tl.arange(0, WIDTH)
    inside = (rows < M)[:, None] & (entries < tile.d_v)[None, :]
    at = rows.to(tl.int64)[:, None]
    o = tl.load(origin(O, b, h, q0) + at * O.row + entries[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(origin(dO, b, h, q0) + at * dO.row + entries[None, :], mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if dL is not None:
        delta -= tl.load(row_values(dL, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=0.0)
    logs = tl.load(row_values(lse, packed, b, h, H, q0, rows_in_all) + rows, mask=rows < M, other=float("inf"))
    first = first_block(packed, b, h, H, q0, stride, B_R).to(tl.int64) * B_R
    tl.store(scratch.logs + first + rows, for_backward(logs, False))
    tl.store(scratch.delta + first + rows, delta)
    if scratch.shift is not None:
        tl.store(scratch.shift + first + rows, tl.where(rows < M, finite(logs), 0.0))
    loop = (b * H + h) // group
    if scratch.ready is not None:
        tl.store(scratch.ready + loop, 0, mask=t == 0)
    if scratch.dq is not None:
        tl.store(scratch.done + b * H + h, 0, mask=t == 0)
        for n in tl.static_range(SIZE // STEP):
            at = (first + t.to(tl.int64) * ROWS) * SIZE + n * ROWS * STEP + tl.arange(0, ROWS)[:, None] * STEP
            zeros = tl.zeros([ROWS, STEP], tl.float32)
            tl.store(scratch.dq + (at + tl.arange(0, STEP)[None, :]), zeros, mask=b * H + h < zeroed)
