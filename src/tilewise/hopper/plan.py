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
from . import by_gradient, by_keys
from .counts import MARGIN, dropout_warps, needs_mask_in_loop, processors, under_diagonal, width_of_box
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


@dataclass(frozen=True, eq=False)
class Plan(Launched):
    """Hold everything about a launch that follows from the problem alone."""

    forward: Forward
    backward: Any
    """Is a row of BACKWARD; it, the next two and `way` are None where there is no backward."""
    backward_tile: Any
    """Is as backward_shape of a kernel's file: of backward/kernel.py's, or of kernel_by_gradient.py's."""
    backward_shape: Any
    way: Any
    """Is the module that plans and launches the backward: by_keys, or by_gradient."""
    c: float
    """Turns logits into base 2, as a factor."""
    forward_c: float | None
    """Holds it for the forward; None with a bias, whose forward keeps m in base e (tile/softmax.py)."""
    boxes: tuple[Box, ...]
    """Describe q, k, v (or their codes) and o to the forward's TMA, then q, k, v, dk, dv and dq to the
    backward's."""
    programs: int
    shape: kernels.Shape
    constants: dict[str, Any]
    """Hold the constants of the forward."""

    def empty_scratch(self, p: Problem, device: torch.device) -> Any:
        """Allocate the backward's scratch."""
        return self.way.empty_scratch(p, self.backward_tile, self.backward_shape, device)


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
    way: Any = back and (by_gradient if back.split_dkdv else by_keys)
    made = (way.backward_tile(p, back), way.backward_shape(p, back, c)) if way else (None, None)
    more = backward_boxes(p, back, way.WIDEST_BOX) if back else ()
    return Plan(
        row, back, *made, way, c, None if p.biased else c, (*boxes, *more),
        min(heads * tiles * constants["tile"].V_PARTS, row.programs * processors(p.q.device)), shape, constants,
    )  # fmt: skip


def backward_boxes(p: Problem, row: Backward, widest: int) -> list[Box]:
    """Describe q, k and v to the backward's TMA; and dk, dv and dq, with the strides that they will have, in boxes of
    at most `widest` columns."""
    wide, of_values = map(width_of_box, columns(p, BACKWARD))
    sides = (p.q, row.B_r, wide), (p.k, row.B_c, wide), (p.v, row.B_c, of_values)
    q, k, v = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (p.q, p.k, p.v))
    dq, dk, dv = empty_parts(p, Operands(q, k, v, ()))
    grads = [(t, min(widest, columns)) for t, columns in ((dk, wide), (dv, of_values), (dq, wide))]
    return [
        *(box(t.shape, t.stride, rows, width, p) for t, rows, width in sides),
        *(box(t.shape, t.stride(), 64, width, p) for t, width in grads),
    ]


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
