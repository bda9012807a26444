"""Compute what follows from a problem alone: tiles, grid sizes, and how many score matrices run concurrently.

A `loop` here is one program's loop over the query tiles that see its key tile (see backward/keys.py).
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from ..call.operands import Operands
from ..call.problem import Problem, empty_parts, once
from ..host.arguments import cdiv, lengths, scale_of
from ..host.outputs import sizes
from ..host.plan import Launched
from ..quantize.codes import BLOCK_K, BLOCK_Q, blocks_of
from ..tile.schedule import assign, assign_each
from ..tile.softmax import LOG2E
from . import by_gradient
from .backward import kernel as backward_kernel
from .counts import MARGIN, dropout_warps, heads_per_loop, narrow, processors, width_of_box
from .descriptors import Box, blocks_box, box
from .forward import kernel as kernels
from .tiles import BACKWARD, FORWARD, SHORT, Backward, Forward, Rows, columns, current, eight_bits_row, padded

SECTION = 16
"""Run at least this many score matrices concurrently where tiles differ in length."""
FULL = 64
"""Queries that fill a warpgroup."""
SHORT_SECTION = {64: 128, 128: 48, 256: 48, 512: 24}
"""Run this many short matrices concurrently, by head size: their keys stay in the L2 cache."""
CACHED_KEYS = {64: 32 << 20, 128: 16 << 20, 256: 32 << 20, 512: 32 << 20}
"""Let longer ones share at most this many bytes of K and V, for the same reason."""
POSTPROCESS_PROCESSORS = 3
"""Leave this many multiprocessors to the postprocess kernel under a narrow window; the backward's main kernel does
without."""
MANY, MANY_ALIKE = 12, 3
"""Let a multiprocessor have this many tiles of the backward before few matrices run concurrently. With fewer, some
would idle in the tail, and sooner where tiles differ in length."""


@dataclass(frozen=True, eq=False)
class Plan(Launched):
    """Hold everything about a launch that follows from the problem alone."""

    forward: Forward
    backward: Any
    """Is a row of BACKWARD; it and the next three are None where there is no backward."""
    backward_tile: Any
    """Is as backward_shape of a kernel's file: of backward/kernel.py's, or of kernel_by_gradient.py's."""
    backward_shape: Any
    ready: Any
    """Counts the loops of which the main kernel zeroes dQ; 0 where preprocess does, for packed sequences."""
    c: float
    """Turns logits into base 2, as a factor."""
    forward_c: float | None
    """Holds it for the forward; None with a bias, whose forward keeps m in base e (tile/softmax.py)."""
    boxes: tuple[Box, ...]
    """Describe q, k, v (or their codes) and o to the forward's TMA, then q, k, v, dk and dv to the backward's; with the
    dK/dV split also dq."""
    programs: int
    shape: kernels.Shape
    constants: dict[str, Any]
    """Hold the constants of the forward."""


@once
def plan(p: Problem) -> Plan:
    """Compute a problem's tiles and constants from the table rows in use."""
    return planned(p, current(p))


def planned(p: Problem, chosen: Rows) -> Plan:
    """Compute the same from any table rows."""
    row, back = chosen
    warps = dropout_warps(p, 256)
    if warps:  # the dropout warps replace a warpgroup, and take registers from the others
        row = row._replace(warpgroups=2, registers=208 if warps == 4 else 224)
    c = scale_of(p) * LOG2E.value
    D, (o, strides_of_o, _) = padded(p), sizes(p)[0]
    boxes = *operand_boxes(p, row.B_c), box(o, strides_of_o, 64, width_of_box(columns(p, FORWARD).of_v), p)
    tiles, heads = p.layout.query_tiles(p, row.B_r)
    of_keys = CACHED_KEYS[D] // (p.N * 2 * D * 2) * (p.H // p.H_k)
    section = 1 if not p.recipe.mask else SHORT_SECTION[D] if max(p.M, p.N) <= SHORT else max(SECTION, of_keys)
    shape = kernels.Shape(*lengths(p), p.D_v, p.H, p.H // p.H_k, heads, section, tiles)
    no_tensors = not (p.extra or p.recipe.dropout or p.listed)
    constants = {
        "tile": forward_tile(p, row, warps)._replace(LOCATE_EARLY=no_tensors),
        "order": assign if p.recipe.mask else assign_each, "num_warps": 4,
        "launch_pdl": not MARGIN,  # there the next launch would wait
    }  # fmt: skip
    if row.programs > 1:  # the producer is a warpgroup, too
        constants["maxnreg"] = 65536 // (row.programs * (row.warpgroups + 1) * 128) // 8 * 8
    back_tile, back_shape, ready, more = planned_backward(p, back, c) if back else (None, None, None, ())
    return Plan(
        row, back, back_tile, back_shape, ready, c, None if p.biased else c, (*boxes, *more),
        min(heads * tiles * constants["tile"].V_PARTS, row.programs * processors(p.q.device)), shape, constants,
    )  # fmt: skip


def planned_backward(p: Problem, row: Backward, c: float) -> Any:
    """Return the backward's constants, its counts, `ready`, and its boxes."""
    wide, of_values = map(width_of_box, columns(p, BACKWARD))
    sides = (p.q, row.B_r, wide), (p.k, row.B_c, wide), (p.v, row.B_c, of_values)
    boxes = [box(t.shape, t.stride, rows, width, p) for t, rows, width in sides] + gradient_boxes(p, row)
    if row.split_dkdv:
        return by_gradient.backward_tile(p, row), by_gradient.backward_shape(p, row, c), 0, boxes
    shape = backward_shape(p, row, c)
    return backward_tile(p, row), shape, shape.heads if p.layout.uniform else 0, boxes


def operand_boxes(p: Problem, B_c: int) -> tuple[Box, Box, Box]:
    """Describe q, k and v to the forward's TMA, or their codes. A box of pages lies in one of them."""
    page, (of_q, of_k), D = p.layout.page(p), blocks_of(p), padded(p)
    wide, of_values = map(width_of_box, columns(p, FORWARD))
    rows = gcd(page, B_c) if page else B_c
    k, v = (box(t.shape, t.stride, rows, 64 if page else n, p) for t, n in ((p.k, wide), (p.v, of_values)))
    exact = box(p.q.shape, p.q.stride, 64, wide, p), k, v
    coded = (
        ((p.H, of_q * BLOCK_Q, D), (64, D)), ((p.H_k, of_k * BLOCK_K, D), (B_c, D)),
        ((p.H_k, of_k * D, BLOCK_K), (D, B_c)),
    )  # fmt: skip
    q, k, v = (
        own if kind is None else blocks_box((p.batch, *shape), (1, 1, *size), kind)
        for own, (shape, size), kind in zip(exact, coded, p.products.code_types, strict=True)
    )
    return q, k, v


def gradient_boxes(p: Problem, row: Backward) -> list[Box]:
    """Describe dk and dv to TMA, with the strides that they will have, and with the dK/dV split dq."""
    q, k, v = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (p.q, p.k, p.v))
    wide, of_values = map(width_of_box, columns(p, BACKWARD))
    dq, dk, dv = empty_parts(p, Operands(q, k, v, ()))
    if row.split_dkdv:  # two stages of P or dS hold a box
        wide, of_values = min(128, wide), min(128, of_values)
    found = [(dk, wide), (dv, of_values), (dq, wide)][: 3 if row.split_dkdv else 2]
    return [box(t.shape, t.stride(), 64, width, p) for t, width in found]


def forward_tile(p: Problem, row: Forward, warps: int) -> kernels.Tile:
    """Return the forward's compile-time constants."""
    masked_loop = needs_mask_in_loop(p, 64, row.B_c)
    half_first_tile = row.B_c == row.B_r == 128 and under_diagonal(p, row.B_c)
    pingpong = row.pingpong and row.warpgroups > 1
    tile = kernels.Tile(
        row.warpgroups, row.B_c, *columns(p, FORWARD), row.q_stages, row.kv_stages,
        pingpong, masked_loop, half_first_tile, row.fetch_early, warps, row.wait_pv, bounded(p), row.registers,
        PAGE=p.layout.page(p), V_PARTS=cdiv(p.D_v, columns(p, FORWARD).of_v),
        K_PIECES=4 if padded(p) > 256 else 1,  # beside Q, K of 64 keys fits once
    )  # fmt: skip
    return with_codes(p, tile) if p.products.codes else tile


def rest_of(p: Problem) -> Problem | None:
    """Return what these kernels leave to the portable ones: sequences below FULL queries, if a pack may have some."""
    recipe = p.recipe.up_to(FULL - 1)._replace(backend="triton") if mixed(p) else None
    return recipe and p._replace(recipe=recipe, max_q=FULL - 1)


def mixed(p: Problem) -> bool:
    """Tell whether a pack may also hold sequences below FULL queries, which then run on the portable kernel."""
    return p.layout.unbounded and p.B > 1 and p.out_dtype == p.dtype


def with_codes(p: Problem, tile: kernels.Tile) -> kernels.Tile:
    """Return the constants of an 8-bit forward. With "fp8", P has too short a range for a shift of the whole row, and
    with scores every logit may be NaN by itself, which half of P's bits would not show."""
    fp8, chosen = p.products.codes_of_v, eight_bits_row(p)
    sums = chosen.sum_by_product and not p.recipe.score
    return tile._replace(
        BOUNDED=tile.BOUNDED and not fp8, QK_BITS=8, PV_BITS=8 if fp8 else 16, P_SCALE_LOG2=8 if fp8 else 0,
        PROMOTE=chosen.promote, SUM_BY_PRODUCT=sums,
        WAIT_PV=tile.WAIT_PV if sums or chosen.promote != "halves" else 0,  # else no product is left to wait for
    )  # fmt: skip


def bounded(p: Problem) -> bool:
    """Return whether the forward can skip the running maximum (see forward/softmax.py's `begin`). P in fp16 lacks the
    range."""
    if p.dtype != torch.bfloat16 or not p.recipe.score:
        return False
    limit = p.kinds[-1].limit(p.recipe.score[-1][1:])
    return limit is not None and limit * LOG2E.value <= 80.0


def backward_tile(p: Problem, row: Backward) -> backward_kernel.Tile:
    """Return the backward's compile-time constants."""
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
    return backward_kernel.Tile(
        row.B_r, row.B_c, *columns(p, BACKWARD), k_stages, row.q_stages, row.do_stages, parts,
        masked_loop, semaphore_tiles(p), heads, p.H // p.H_k // heads, two_loops,
        dropout_warps(p, 128),
    )  # fmt: skip


def backward_shape(p: Problem, row: Backward, unit: float) -> backward_kernel.Shape:
    """Return the backward's factors and counts, and how many matrices run concurrently."""
    tiles, heads = cdiv(p.N, row.B_c), heads_per_loop(p, row)
    loops, most, same = p.B * p.H // heads, max(1, processors(p.q.device) // tiles), alike(p)
    cached = most
    if loops >= (MANY_ALIKE if same else MANY) * most and not p.recipe.deterministic:
        cached = max(1 if same else min(2, most), most // 4)  # sums of dQ stay in the L2 cache
    section = p.layout.concurrent(most, p.H // heads, cached)
    return backward_kernel.Shape(
        unit, p.scale, *lengths(p), p.D, p.D_v, p.H, p.query_blocks(row.B_r), loops, section, tiles,
        p.key_blocks(row.B_c),
    )  # fmt: skip


def needs_mask_in_loop(p: Problem, own: int, other: int) -> bool:
    """Return whether a loop over tiles of `other` may need the mask after its first tile. It does not where the
    diagonal of a block of `own` rows (or keys) lies inside one tile."""
    alone = p.recipe.mask == (("Causal",),)
    return bool(p.recipe.mask) and not (alone and other % own == 0 and under_diagonal(p, own))


def under_diagonal(p: Problem, size: int) -> bool:
    """Return whether every row's last key lies on the diagonal, and the diagonal crosses tiles of `size` in their
    corners."""
    offset = p.layout.common(p.N - p.M)
    aligned = offset % size == 0 and offset >= 0
    return aligned and bool(p.recipe.mask) and all([mask.hides_later_keys for mask in p.masks])


def main_programs(p: Problem, shape: Any) -> int:
    """Return the main kernel's grid: one program per multiprocessor. Under a narrow window there is less to multiply
    for as much dQ to write. So postprocess gets some multiprocessors from the start; otherwise all would wait for it in
    the tail."""
    tiles, most = shape.heads * shape.tiles, processors(p.q.device)
    return most - POSTPROCESS_PROCESSORS if tiles > 8 * most and narrow(p) else min(tiles, most)


def alike(p: Problem) -> bool:
    """Tell whether the backward's tiles have about one length."""
    return not p.recipe.mask or narrow(p) or max(p.M, p.N) <= SHORT


def semaphore_tiles(p: Problem) -> int:
    """Return the query tiles per step of ordered accumulation (deterministic dQ), or 0 without it."""
    return 2 if p.recipe.deterministic else 0
