"""Plan and launch the backward to head size 128: key tiles, with sums of dQ in memory (see backward/kernel.py)."""

from typing import Any

import torch
from torch import Tensor

from ..call.operands import Grads, Operands
from ..call.problem import Problem, once
from ..host.arguments import cdiv, lengths, odd_counts, rows
from ..host.launch import Launch
from ..host.outputs import empty, size
from ..tile.ranges import Variant
from ..tile.rows import Packed
from .backward.deterministic import attention_backward_init_semaphore
from .backward.gqa_reduce import GqaSums
from .backward.kernel import Shape, Tile, attention_backward
from .backward.postprocess import attention_backward_postprocess
from .counts import dropout_warps, gqa_sizes, heads_per_loop, narrow, needs_mask_in_loop, processors, width_of_box
from .descriptors import Descriptor, box, sums_of_dq, vector
from .parts.call import Scratch
from .tiles import BACKWARD, SHORT, Backward, columns, padded

WIDEST_BOX = 256
"""Limits the columns of a box of dK and dV."""
ORDERS_DQ = True
"""Says whether sums of dQ that must repeat have an order, with semaphores."""
SEMAPHORE_TILES = 2
"""Counts the query tiles that share one."""
POSTPROCESS_PROCESSORS = 3
"""Leave this many multiprocessors to postprocess under a narrow window."""
MANY, MANY_ALIKE = 12, 3
"""Let a multiprocessor have this many tiles of the backward before few matrices run concurrently. With fewer, some
would idle in the tail, and sooner where tiles differ in length."""


def backward_tile(p: Problem, row: Backward) -> Tile:
    """Return the compile-time constants."""
    heads = heads_per_loop(p, row)
    many = heads > 1  # then the loop reaches the first tile of each
    # 128 queries rarely see only one half of a key tile; with scores, registers are short
    parts = bool(p.recipe.mask) and row.B_r < row.B_c and not (p.listed or p.recipe.score)
    masked_loop = (
        needs_mask_in_loop(p, 64 if parts else row.B_c, row.B_r) or (many and bool(p.recipe.mask)) or p.N % row.B_c > 0
    )
    # keep a second K where there is room; not where heads share keys: long loops are slower with it
    k_stages = 1 if many or p.recipe.dropout else 2
    # faster where a loop would carry scores, or a mask over many heads; slower elsewhere
    two_loops = masked_loop and padded(p) == 128 and (many or bool(p.recipe.score))
    return Tile(
        row.B_r, row.B_c, *columns(p, BACKWARD), k_stages, row.q_stages, row.do_stages, parts,
        masked_loop, SEMAPHORE_TILES * p.recipe.deterministic, heads, p.H // p.H_k // heads, two_loops,
        dropout_warps(p, 128),
    )  # fmt: skip


def backward_shape(p: Problem, row: Backward, unit: float) -> Shape:
    """Return the factors and counts, and how many matrices run concurrently."""
    tiles, heads = cdiv(p.N, row.B_c), heads_per_loop(p, row)
    loops, most = p.B * p.H // heads, max(1, processors(p.q.device) // tiles)
    alike, cached = not p.recipe.mask or narrow(p) or max(p.M, p.N) <= SHORT, most  # whether tiles have one length
    if loops >= (MANY_ALIKE if alike else MANY) * most and not p.recipe.deterministic:
        cached = max(1 if alike else min(2, most), most // 4)  # sums of dQ stay in the L2 cache
    section = p.layout.concurrent(most, p.H // heads, cached)
    return Shape(
        unit, p.scale, *lengths(p), p.D, p.D_v, p.H, p.query_blocks(row.B_r), loops, section, tiles,
        p.key_blocks(row.B_c),
    )  # fmt: skip


@once
def scratch_sizes(p: Problem, tile: Any, shape: Any) -> list[Any]:
    """Return the sizes of a scratch's tensors, in their order; None for one that is left out, or not only allocated.
    `shape` is None in fp32, where the preprocess kernel zeroes all of dQ, as for packed sequences."""
    rows = p.query_blocks(tile.B_R) * p.H * p.batch * tile.B_R
    found = [size(torch.float32, rows * width) for width in (1, 1, tile.D)]
    found += [None, size(torch.int32, shape.heads) if shape is not None and p.layout.uniform else None]
    return [*found, *(gqa_sizes(p, tile.B_C, tile.GQA_PROGRAMS) or [None]), size(torch.int32, p.B * p.H), None]


def empty_scratch(p: Problem, tile: Any, shape: Any, device: torch.device) -> Scratch:
    """Allocate a scratch, unwritten, except semaphores: these hold -1, no tile."""
    made = [each and empty(each, device) for each in scratch_sizes(p, tile, shape)]
    logs, delta, dq, semaphore, ready, *sums, done, shift = made
    if p.recipe.deterministic:
        semaphore = torch.full((len(logs) // tile.B_R,), -1, dtype=torch.int32, device=device)
    if p.biased:
        logs, shift = torch.empty(2, *logs.shape, device=device)
    return Scratch(logs, delta, dq, semaphore, ready, GqaSums(*sums) if sums[1:] else None, done, shift)


def zeros(p: Problem, pl: Any, scratch: Scratch) -> tuple[Scratch, int, int]:
    """Return the scratch as the preprocess kernel takes it, with semaphores in place of GQA sums; of how many matrices
    it zeroes dQ, and how many semaphores."""
    zeroed = p.B * p.H if scratch.ready is None else pl.backward_shape.section * pl.backward_tile.GROUP
    sums: Any = scratch.gqa_sums
    semaphore, count = (scratch.done, 0) if sums is None else (sums.semaphore, sums.semaphore.numel())
    return scratch._replace(gqa_sums=semaphore), zeroed, count


def main_programs(p: Problem, shape: Any) -> int:
    """Return the main kernel's grid: a program for each multiprocessor. Under a narrow window there is less to multiply
    for as much dQ to write, so postprocess has some from the start; otherwise all would wait for it at the end."""
    tiles, most = shape.heads * shape.tiles, processors(p.q.device)
    return most - POSTPROCESS_PROCESSORS if tiles > 8 * most and narrow(p) else min(tiles, most)


def launches(
    p: Problem, pl: Any, x: Operands, do: Tensor, scratch: Scratch, grads: Grads, counter: Tensor,
    where: Packed | None, variant: Variant, key: Any,
) -> tuple[list[Launch], list[Launch]]:  # fmt: skip
    """Return the launches before preprocess: one that orders sums of dQ, if they must repeat. And those after it, which
    begin while the kernel before ends: the main kernel, which computes dK, dV and sums of dQ, and postprocess."""
    row, tile, shape = pl.backward, pl.backward_tile, pl.backward_shape
    wide = p.out_dtype != p.dtype  # descriptors then give the type of products alone
    Q, K, V, dK, dV = map(Descriptor, (*x[:3], *(x[1:3] if wide else grads[1:3])), pl.boxes[4:9])
    dO = Descriptor(do, box(do.shape, do.stride(), row.B_r, width_of_box(tile.D_V), p))
    arguments = (
        Q, K, V, dO, vector(scratch.logs, row.B_r, 1 if scratch.shift is None else 2), vector(scratch.delta, row.B_r),
        sums_of_dq(scratch.dq, 8 if tile.D % 64 else 16), dK, dV,
        (rows(grads.k), rows(grads.v)) if wide or where is not None else (None, None), scratch, counter, where,
        variant, odd_counts(shape),
    )  # fmt: skip
    constants = {"tile": tile, "num_warps": 4, "launch_pdl": True}
    main = Launch(attention_backward, main_programs(p, shape), arguments, constants, pl.compiled, key)
    order = [order_launch(p, pl, tile, scratch, where, variant)] if p.recipe.deterministic else []
    return order, [main, postprocess_launch(p, pl, tile, scratch, grads.q, where)]


def order_launch(p: Problem, pl: Any, tile: Any, scratch: Scratch, where: Packed | None, variant: Variant) -> Launch:
    """Return the launch that orders the sums of dQ, in tiles of the main kernel."""
    tiles = cdiv(p.N, tile.B_C)
    arguments = scratch.dq_semaphore, where, variant, *lengths(p), p.H, tiles, p.query_blocks(tile.B_R)
    constants = {"B_R": tile.B_R, "B_C": tile.B_C, "SEMAPHORE_TILES": tile.SEMAPHORE_TILES}
    return Launch(attention_backward_init_semaphore, p.B * p.H * tiles, arguments, constants, pl.compiled)


def postprocess_launch(p: Problem, pl: Any, tile: Any, scratch: Scratch, dq: Tensor, where: Packed | None) -> Launch:
    """Return the postprocess launch, which computes dQ from its sums."""
    pieces = tile.D // 64 if tile.D % 64 == 0 else 1
    tiles = cdiv(p.M, tile.B_R) * tile.B_R // 64 * pieces
    arguments = (
        scratch.dq, rows(dq), scratch.done, where, p.scale, *lengths(p), p.H, tiles, cdiv(p.N, tile.B_C),
        p.query_blocks(tile.B_R), tile.GROUP,
    )  # fmt: skip
    constants = {"d": p.D, "B_R": tile.B_R, "B_C": tile.B_C, "SIZE": tile.D, "launch_pdl": True}
    return Launch(attention_backward_postprocess, p.B * p.H * tiles, arguments, constants, pl.compiled)


def describe(p: Problem, tile: Any, shape: Any) -> list[str]:
    """Describe how programs share the work."""
    return ["split by keys"]
