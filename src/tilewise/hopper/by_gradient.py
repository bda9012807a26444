"""Plan and launch the backward beyond head size 128, where dS passes through memory (see backward/items.py)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.operands import Grads, Operands
from ..call.problem import Problem, once
from ..host.arguments import cdiv, lengths, odd_counts, rows
from ..host.launch import Launch
from ..host.outputs import empty, size
from ..tile.ranges import Variant
from ..tile.rows import Packed
from ..values.intervals import Causal, Window
from ..values.value import OPEN
from .backward.gqa_reduce import GqaSums
from .backward.items import QUERIES, Shape, Work
from .backward.kernel_by_gradient import Tile, attention_backward_by_gradient
from .counts import dropout_warps, gqa_sizes, heads_per_loop, processors, width_of_box
from .descriptors import Box, Descriptor, box, layout_of, vector
from .parts.call import Scratch as RowScratch
from .tiles import BACKWARD, Backward, columns

WIDEST_BOX = 128
"""Limits the columns of a box of dQ, dK and dV: two stages of P or dS hold one."""
ORDERS_DQ = False  # its sums have one order
SECTIONS = 3
"""Let so many sections of chunks have memory for dS. With fewer, key tiles would wait for query tiles that have only
begun."""
WORKSPACE = 512 << 20
"""Let one more have some where all of it is at most so many bytes."""
MOST_TILES = 144
"""Limits the key tiles of a chunk: about one for each multiprocessor."""


class Scratch(NamedTuple):
    """Hold what passes between the kernels, and between programs of the main one. Other fields are as in `Work`."""

    logs: Tensor
    """Holds the lse in base 2, (rows,), fp32, in blocks of B_r rows of a head (tile/rows.py); so does `delta`."""
    delta: Tensor
    ds: Tensor
    """Holds tiles of dS of B_c x B_r entries, transposed, in q's type, one behind the other (see `ds_at`)."""
    counts: Tensor
    sums: Tensor | None
    gqa_sums: Tensor | None
    shift: Tensor | None = None


def backward_tile(p: Problem, row: Backward) -> Tile:
    """Return the compile-time constants."""
    heads = heads_per_loop(p, row, 1)  # dS of more would be in memory at one time
    return Tile(
        row.B_r, row.B_c, *columns(p, BACKWARD), row.q_stages, row.do_stages, heads, p.H // p.H_k // heads,
        dropout_warps(p, 128), paired(p, row),
    )  # fmt: skip


def band(p: Problem) -> tuple[int, int]:
    """Return from which to before which distance j - i every query may see keys, by causal masks and windows. The ends
    of functions may grow with i."""
    ends = [mask.keys(0) for mask in p.masks if isinstance(mask, Causal | Window)]
    first, end = zip((-OPEN, OPEN), *ends, strict=True)
    return max(first), min(end)


def seen(p: Problem, row: Backward) -> int:
    """Bound the blocks of queries that see a key tile."""
    first, end = band(p)
    return min(cdiv(p.M, row.B_r), cdiv(end - first - 1 + row.B_c, row.B_r) + 1)


def paired(p: Problem, row: Backward) -> bool:
    """Tell whether two key tiles share a row of dS: whether later keys are hidden, and no window is so narrow that it
    needs less."""
    square = p.layout.uniform and p.M == p.N and not p.listed
    return square and band(p)[1] <= 1 and cdiv(p.M, row.B_r) + 1 < 2 * seen(p, row)


def backward_shape(p: Problem, row: Backward, unit: float) -> Shape:
    """Return the factors and counts, with chunks and how many of them have memory."""
    tile, key_tiles = backward_tile(p, row), max(1, p.key_blocks(row.B_c))
    loops = p.H // tile.GROUP * p.batch
    chunks = cdiv(key_tiles, MOST_TILES)
    tiles = 2 * cdiv(cdiv(key_tiles, 2), chunks) if tile.PAIRED else cdiv(key_tiles, chunks)
    section = 1 if chunks > 1 else min(loops, max(1, processors(p.q.device) // tiles))
    blocks = p.query_blocks(row.B_r)
    semaphores = 2 * key_tiles * p.H_k * p.batch if tile.GQA_PROGRAMS > 1 else 1
    shape = Shape(
        unit, p.scale, *lengths(p), p.D, p.D_v, p.B, p.H, blocks, key_tiles, p.query_blocks(QUERIES.value), loops,
        chunks, tiles, section, section * (SECTIONS + 1), seen(p, row), semaphores,
    )  # fmt: skip
    resident = section * SECTIONS if bytes_of_ds(p, tile, shape) > WORKSPACE else section * (SECTIONS + 1)
    return shape._replace(resident=min(resident, loops * chunks))


def tiles_of_ds(tile: Tile, shape: Any) -> int:
    """Count the tiles of dS that have memory, as backward/items.py places them."""
    each = shape.tiles // 2 * (shape.blocks + 1) if tile.PAIRED else shape.tiles * shape.seen
    return shape.resident * tile.GROUP * each


def bytes_of_ds(p: Problem, tile: Tile, shape: Any) -> int:
    """Count their bytes."""
    return tiles_of_ds(tile, shape) * tile.B_R * tile.B_C * p.dtype.itemsize


@once
def scratch_sizes(p: Problem, tile: Tile, shape: Any) -> list[Any]:
    """Return the sizes of a Scratch's tensors, in their order; None for one that is left out."""
    rows_of_q = p.query_blocks(tile.B_R) * p.H * p.batch * tile.B_R
    tiles = tiles_of_ds(tile, shape)
    counts = shape.semaphores + tiles + 2 * shape.heads * shape.chunks
    sums = tile.GROUP * shape.query_tiles * QUERIES.value * tile.D
    gqa_sums = gqa_sizes(p, tile.B_C, tile.GQA_PROGRAMS)[:1] or [None]
    return [
        *[size(torch.float32, rows_of_q)] * 2, size(p.dtype, tiles * tile.B_R * tile.B_C), size(torch.int32, counts),
        size(torch.float32, sums) if shape.chunks > 1 else None, *gqa_sums, None,
    ]  # fmt: skip


def empty_scratch(p: Problem, tile: Tile, shape: Any, device: torch.device) -> Scratch:
    """Allocate a scratch, unwritten."""
    made = Scratch(*[each and empty(each, device) for each in scratch_sizes(p, tile, shape)])
    if not p.biased:
        return made
    logs, shift = torch.empty(2, *made.logs.shape, device=device)
    return made._replace(logs=logs, shift=shift)


def zeros(p: Problem, pl: Any, scratch: Scratch) -> tuple[RowScratch, int, int]:
    """Return the same as by_keys.zeros: counts take the place of GQA sums, and no sums of dQ are zeroed."""
    of_rows = RowScratch(scratch.logs, scratch.delta, None, None, None, scratch.counts, None, scratch.shift)
    return of_rows, 0, scratch.counts.numel()


def launches(
    p: Problem, pl: Any, x: Operands, do: Tensor, scratch: Scratch, grads: Grads, counter: Tensor,
    where: Packed | None, variant: Variant, key: Any,
) -> tuple[list[Launch], list[Launch]]:  # fmt: skip
    """Return what precedes preprocess, nothing; and what follows it, the kernel that computes dQ, dK and dV."""
    row, tile, shape = pl.backward, pl.backward_tile, pl.backward_shape
    wide = p.out_dtype != p.dtype  # descriptors then give the type of products alone
    tensors = *x[:3], *(x[1:3] if wide else grads[1:3]), x.q if wide else grads.q
    Q, K, V, dK, dV, dQ = map(Descriptor, tensors, pl.boxes[4:])
    dO = Descriptor(do, box(do.shape, do.stride(), row.B_r, width_of_box(tile.D_V), p))
    block = row.B_c, row.B_r
    dS = Descriptor(
        scratch.ds, Box([scratch.ds.numel() // row.B_r, row.B_r], [row.B_r, 1], [*block], layout_of(block, p.dtype))
    )
    by_rows = wide or where is not None
    strides = tuple([rows(t) if by_rows else None for t in grads[:3]])
    gqa_sums = None if scratch.gqa_sums is None else GqaSums(scratch.gqa_sums, scratch.counts)
    work = Work(scratch.counts, scratch.sums, gqa_sums, scratch.shift, counter)
    arguments = (
        Q, K, V, dO, vector(scratch.logs, row.B_r, 1 if scratch.shift is None else 2), vector(scratch.delta, row.B_r),
        dS, dQ, dK, dV, strides, work, where, variant, odd_counts(shape),
    )  # fmt: skip
    constants = {"tile": tile, "num_warps": 4, "launch_pdl": True}
    programs = min(processors(p.q.device), shape.heads * shape.chunks * shape.tiles)
    return [], [Launch(attention_backward_by_gradient, programs, arguments, constants, pl.compiled, key)]


def describe(p: Problem, tile: Tile, shape: Any) -> list[str]:
    """Describe how programs share the work, and the memory of dS."""
    return ["split by gradient", f"dS passes through {bytes_of_ds(p, tile, shape) >> 20} MiB of memory"]
