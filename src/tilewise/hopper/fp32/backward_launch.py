"""Launch the fp32 backward on Hopper: preprocess, the main kernel, and postprocess, which converts sums into dQ.

The forward also uses the pieces of K and V defined here: it makes and saves them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.operands import Grads, Operands, Saved
from ...call.problem import Problem, once
from ...host.arguments import TINY, cdiv, lengths, odd, packed, rows, unplanned, unused
from ...host.launch import Launch
from ...host.lists import tile_lists
from ...host.sink import sink_launches
from ...host.values import device_values
from ...tile.ranges import Variant
from .. import by_keys
from ..by_keys import SEMAPHORE_TILES, order_launch, postprocess_launch
from ..counts import even_section, heads_per_loop, processors
from ..descriptors import Descriptor, blocks_box, sums_of_dq, vector
from ..parts.call import Scratch as RowScratch
from ..tiles import KINDS, Kind, padded, precision
from . import preprocess
from .backward import Shape, Tile, attention_backward_fp32
from .preprocess import Blocks, Scales
from .split import Split, attention_split_fp32


class Row(NamedTuple):
    """Hold a row of the table of tiles; its fields are those of fp32/backward.py's `Tile`."""

    B_c: int
    q_stages: int
    do_stages: int
    sync_groups: bool = False
    B_r: int = 64


ROWS = {
    (64, "fp16x3"): Row(128, 2, 2),
    (64, "bf16x6"): Row(128, 2, 1),
    (128, "fp16x3"): Row(64, 2, 2),
    (128, "bf16x6"): Row(64, 1, 1, sync_groups=True),
}
"""Maps a head size in shared memory and a precision to a row."""
BLOCK = 64
"""Counts the rows of a block of queries, which share one scale; row values lie in such blocks, too."""


class Keys(NamedTuple):
    """Hold K and V in pieces, (piece, block, row, column), as the forward reads them, too. A block is a key tile of the
    backward. Each has its descale factors, and the largest norm of a row of V; each head has its centres."""

    k: Tensor
    v: Tensor
    k_descale: Tensor
    v_descale: Tensor
    v_norm: Tensor
    k_centre: Tensor
    v_centre: Tensor


class Scratch(NamedTuple):
    """Hold what passes between the kernels: pieces as in `Keys`, numbers of each block, row values and sums of dQ."""

    q: Tensor
    do: Tensor
    keys: Keys
    scales: Scales
    rows: RowScratch
    from_forward: bool
    """Says whether the keys are the forward's."""


class Sizes(NamedTuple):
    """Hold the tile, and the counts that follow from the problem."""

    row: Row
    tile: Tile
    kind: Kind
    queries: int
    """Counts the blocks of all queries in scratch."""
    keys: int
    query_tiles: int
    """Counts a head's query tiles in scratch; for packed sequences, those of all sequences."""
    key_tiles: int


@once
def sizes_of(p: Problem) -> Sizes:
    """Compute the problem's tiles, and what follows from them."""
    D, name = padded(p), precision(p) or ""  # called only where there is one
    row, kind = ROWS[D, name], KINDS[name]
    of_queries, of_keys, heads = p.query_blocks(row.B_r), p.key_blocks(row.B_c), heads_per_loop(p, row)
    tail = p.layout.common(p.N) % row.B_c
    tile = Tile(
        row.B_r, row.B_c, D, kind.pieces, row.q_stages, row.do_stages, bool(p.recipe.mask) or tail > 0,
        SEMAPHORE_TILES * p.recipe.deterministic, heads, p.H // p.H_k // heads, row.sync_groups,
    )  # fmt: skip
    return Sizes(row, tile, kind, p.batch * p.H * of_queries, p.batch * p.H_k * of_keys, of_queries, of_keys)


def empty_keys(p: Problem, device: torch.device) -> Keys:
    """Allocate K and V in pieces, unwritten."""
    sizes = sizes_of(p)
    shape = sizes.kind.pieces, sizes.keys, sizes.tile.B_C, sizes.tile.D
    k, v = (torch.empty(shape, dtype=sizes.kind.type, device=device) for _ in range(2))
    numbers = (torch.empty(sizes.keys, device=device) for _ in range(3))
    return Keys(k, v, *numbers, *(torch.empty((p.B, p.H_k, sizes.tile.D), device=device) for _ in range(2)))


def saved_keys(p: Problem, saved: Saved) -> Keys | None:
    """Return the keys that the forward saved, unless torch's setting has asked for another precision since."""
    fits = saved.extra and saved.extra[0].dtype == sizes_of(p).kind.type
    return Keys(*saved.extra) if fits else None


def empty_scratch(p: Problem, device: torch.device, given: Keys | None = None) -> Scratch:
    """Allocate scratch without writing it, except the keys given and semaphores: these hold -1, no tile."""
    sizes, keys = sizes_of(p), given or empty_keys(p, device)
    shape = sizes.kind.pieces, sizes.queries, BLOCK, sizes.tile.D
    q, do = (torch.empty(shape, dtype=sizes.kind.type, device=device) for _ in range(2))
    q_descale, do_descale, do_norm, D_top = (torch.empty(sizes.queries, device=device) for _ in range(4))
    scales = Scales(q_descale, do_descale, keys.k_descale, keys.v_descale, do_norm, keys.v_norm, D_top)
    row_values = by_keys.empty_scratch(p, sizes.tile, None, device)
    sums: Any = row_values.gqa_sums
    if sums is not None:  # in fp32 the preprocess kernel zeroes no semaphore
        sums.semaphore.zero_()
    return Scratch(q, do, keys, scales, row_values, given is not None)


def launches(
    p: Problem, pl: Any, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: Scratch, grads: Grads,
    counter: Tensor,
) -> list[Launch]:  # fmt: skip
    """Return the launches in order: split K and V unless saved, list tiles, preprocess, the main kernel, postprocess,
    the sink. Preprocess splits Q and dO and computes row values. The main kernel computes dK, dV and sums of dQ.

    Of the plan `pl`, only `compiled` is read. do may have any strides, with adjacent entries in rows.
    """
    splits = [] if scratch.from_forward else [split_launch(p, pl, x, scratch.keys)]
    before = preprocess_launch(p, pl, x, saved, do, dlse, scratch, grads)
    *listing, main = main_launches(p, pl, x, scratch, grads, counter)
    after = postprocess_launch(p, pl, sizes_of(p).tile, scratch.rows, grads.q, packed(p, x))
    sink = sink_launches(p, pl, x, saved.lse, scratch.rows.delta, BLOCK, grads, unplanned(saved, do, dlse))
    return [*splits, *listing, before, main, after, *sink]


def split_launch(p: Problem, pl: Any, x: Operands, keys: Keys, saved: Saved | None = None) -> Launch:
    """Return the launch that splits K and V. It serves the forward, whose outputs are `saved`, and a backward that
    finds no keys saved."""
    sizes, tile = sizes_of(p), sizes_of(p).tile
    tiles = cdiv(p.N, tile.B_C)
    operands = (
        Split(rows(x.k), keys.k, keys.k_descale, None, keys.k_centre),
        Split(rows(x.v), keys.v, keys.v_descale, keys.v_norm, keys.v_centre),
    )
    arguments = operands, packed(p, x), unused(p, saved), *lengths(p), p.H_k, tiles, sizes.key_tiles, sizes.keys
    constants = {"KEYS": True, "SIZES": (p.D, p.D_v), "ROWS": tile.B_C, "SIZE": tile.D, "PDL": True, "num_warps": 8}
    return Launch(attention_split_fp32, 2 * p.B * p.H_k * tiles, arguments, constants, pl.compiled, saved is None)


def preprocess_launch(
    p: Problem, pl: Any, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: Scratch, grads: Grads
) -> Launch:
    """Return the preprocess launch over blocks of queries and of keys."""
    _, tile, _, *blocks = sizes_of(p)
    scales, (k, v, *_, k_centre, v_centre) = scratch.scales, scratch.keys
    operands = preprocess.Operands(
        Split(rows(x.q), scratch.q, scales.q),
        Split(rows(x.k), k, scales.k, None, k_centre),
        Split(rows(x.v), v, scales.v, scales.v_norm, v_centre),
        Split(rows(do), scratch.do, scales.do, scales.do_norm),
        rows(saved.o), dlse, saved.lse,
    )  # fmt: skip
    of_keys, of_queries = cdiv(p.N, tile.B_C), cdiv(p.M, tile.B_R)
    if p.recipe.sink:  # never centred
        of_keys = 0
    arguments = (
        operands, scales.D, scratch.rows._replace(gqa_sums=None), packed(p, x), unused(p, grads=grads),
        max(p.scale, TINY), *lengths(p), p.H, p.H // p.H_k, p.B, of_keys, of_queries,
        Blocks(*map(odd, blocks)),
    )  # fmt: skip
    # with a gradient of lse, or with a sink, dQ is no sum of differences of keys
    centred = dlse is None and not p.recipe.sink
    constants = {
        "tile": preprocess.Tile(p.D, p.D_v, tile.B_C, tile.D, centred), "PDL": True,
        "num_warps": tile.D // 8, "maxnreg": 64,  # no more, so that 32 warps wait for memory at once
    }  # fmt: skip
    programs = p.B * (2 * p.H * of_queries + p.H_k * of_keys)
    key, kernel = unplanned(saved, do, dlse), preprocess.attention_backward_preprocess_fp32
    return Launch(kernel, programs, arguments, constants, pl.compiled, key)


def main_launches(p: Problem, pl: Any, x: Operands, scratch: Scratch, grads: Grads, counter: Tensor) -> list[Launch]:
    """Return the main kernel's launch, and before it one that lists tiles or orders the sums of dQ, if needed."""
    sizes, tile = sizes_of(p), sizes_of(p).tile
    where, (parts, _, _) = packed(p, x), device_values(p, x.extra)
    lists, listing = tile_lists(p, pl, sizes.row, parts, x, by_key=True)
    variant = Variant(parts, (), None, lists)
    tiles, heads = cdiv(p.N, tile.B_C), p.B * p.H // tile.GROUP
    if p.recipe.deterministic:
        listing = [order_launch(p, pl, tile, scratch.rows, where, variant)]
    concurrent = processors(p.q.device) // tiles
    alike = p.layout.uniform and not (p.recipe.mask or p.recipe.deterministic)
    # where tiles are alike, sums of dQ stay in the L2 cache
    section = even_section(heads, max(1, concurrent // 2 if alike else 2 * concurrent))
    shape = Shape(
        max(p.scale, TINY), p.scale, *lengths(p), p.D, p.D_v, p.H, sizes.query_tiles, sizes.key_tiles, heads,
        section, tiles,
    )  # fmt: skip
    arguments = (
        *(boxes(t, 1, 64) for t in (scratch.q, scratch.keys.k, scratch.keys.v, scratch.do)),
        *(vector(t, tile.B_R) for t in scratch.rows[:2]), scratch.scales, sums_of_dq(scratch.rows.dq),
        rows(grads.k), rows(grads.v), scratch.rows, counter, where, variant, shape,
    )  # fmt: skip
    constants = {"tile": tile, "num_warps": 4, "launch_pdl": True}
    programs = min(heads * tiles, processors(p.q.device))
    return [*listing, Launch(attention_backward_fp32, programs, arguments, constants, pl.compiled)]


def boxes(t: Tensor, pieces: int, size: int) -> Descriptor:
    """Describe pieces to TMA, (piece, row, column), in boxes of `size` rows of one piece, or of two."""
    count, blocks, rows, columns = t.shape
    return Descriptor(t, blocks_box((count, blocks * rows, columns), (pieces, size, columns), t.dtype))
