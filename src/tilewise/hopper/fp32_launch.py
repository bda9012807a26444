"""Launches of the fp32 kernels on Hopper: operands into 16-bit pieces, then attention on pieces."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ..problem import Grads, Operands, Problem, Saved
from ..reference import sink_gradient
from ..tile.launch import (
    Launch,
    cdiv,
    current_stream,
    device_values,
    empty_grads,
    empty_saved,
    lengths,
    packed,
    rows,
    visits,
)
from ..tile.schedule import assign
from ..tile.softmax import LOG2E
from ..tile.visits import Variant
from . import fp32_backward as gradients
from . import fp32_forward as kernels
from .launch import (
    CACHED_KEYS,
    SECTION,
    TINY,
    TYPES,
    Box,
    Descriptor,
    addressable,
    box,
    by_row,
    counter,
    has_edges,
    processors,
)
from .pieces import Split, split
from .tiles import Fp32Forward, current_fp32, padded

PIECES = {"fp16x3": torch.float16, "bf16x6": torch.bfloat16}
"""What takes the place of fp32 at each precision."""
COUNT = {torch.float16: 2, torch.bfloat16: 3}
"""Pieces of a number."""
RAISE = {torch.float16: 15, torch.bfloat16: 0}
"""P is computed 2^RAISE times as large, to fill fp16's range."""


class Plan(NamedTuple):
    """Everything about a launch that follows from the problem alone."""

    forward: Fp32Forward
    type: torch.dtype
    """Of the pieces."""
    c: float
    """Logits times c are in base 2."""
    q: Box
    """How TMA sees q."""
    keys: Any
    """The layout of a key tile's piece in shared memory."""
    blocks: int
    """Key tiles of a head in memory."""
    programs: int
    shape: kernels.Shape
    split_constants: dict[str, Any]
    constants: dict[str, Any]
    listed: bool
    values: tuple[Any, Any, Tensor | None] | None
    compiled: dict[Any, Any]


def precision(p: Problem) -> str | None:
    """How products are computed; None if the one asked for is not among them."""
    return p.precision(tuple(PIECES))


@lru_cache(4096)
def plan(p: Problem) -> Plan:
    """Tiles and constants of a problem, from the row in use."""
    return planned(p, current_fp32(p, precision(p)))


def planned(p: Problem, row: Fp32Forward) -> Plan:
    """The same from any row."""
    kind, D, group = PIECES[precision(p) or "bf16x6"], padded(p), p.H // p.H_k
    count = COUNT[kind]
    blocks = p.k.shape[0] // row.B_c + p.B if p.recipe.varlen else cdiv(p.N, row.B_c)
    in_all = blocks * p.H_k * (1 if p.recipe.varlen else p.B)
    tiles, heads = cdiv(p.M, row.B_r), p.B * p.H
    section = max(SECTION, CACHED_KEYS // (p.N * 2 * D * 2 * count) * group) if p.recipe.mask else 1
    shape = kernels.Shape(
        *lengths(p), p.D_v, p.H, group, heads, section, tiles, assign, blocks, in_all * row.B_c
    )  # fmt: skip
    tile = kernels.Tile(
        2, row.B_c, D, count, row.kv_stages, row.q_apart, row.turns, has_edges(p, row.B_r, row.B_c), row.split,
        RAISE[kind],
    )  # fmt: skip
    return Plan(
        row, kind, max(p.scale, TINY) * LOG2E.value, box(p.q.shape, p.q.stride, 64, D, p),
        gl.NVMMASharedLayout.get_default_for([row.B_c, D], TYPES[kind]), blocks,
        min(heads * tiles, processors(p.q.device)), shape,
        {"KEYS": True, "SIZES": (p.D, p.D_v), "ROWS": row.B_c, "SIZE": D, "num_warps": row.B_c // 16 * D // 64},
        {"tile": tile, "REGISTERS": row.registers, "num_warps": 4},
        p.listed, None if p.extra else device_values(p, ()), {},
    )  # fmt: skip


def forward_launches(p: Problem, pl: Plan, x: Operands, saved: Saved, counter: Tensor) -> list[Launch]:
    """K and V into pieces; attention, and before it lists of tiles if they are listed."""
    parts, _, sink = pl.values or device_values(p, x.extra)
    where, (K, V) = packed(p, x), empty_pieces(p, pl, x)
    lists, listing = visits(p, pl, pl.forward, parts, x.q.device, by_key=False)
    tiles, in_all = cdiv(p.N, pl.forward.B_c), K.pieces.shape[1]
    arguments = ((K, V), where, *lengths(p), p.H_k, tiles, pl.blocks, in_all)
    cut = Launch(split, 2 * p.B * p.H_k * tiles, arguments, pl.split_constants, pl.compiled)
    scaled = pl.type == torch.float16
    arguments = (
        Descriptor(x.q, *pl.q), *(kernels.Keys(boxes(part, pl), part.undo if scaled else None) for part in (K, V)),
        rows(p, saved.o), saved.lse, counter, where, sink, Variant(parts, (), None, lists), pl.c, pl.shape,
    )  # fmt: skip
    return [cut, *listing, Launch(kernels.fp32_forward, pl.programs, arguments, pl.constants, pl.compiled)]


def empty_pieces(p: Problem, pl: Plan, x: Operands) -> tuple[Split, Split]:
    """Where the pieces of K and V go, in key tiles."""
    size, B_c = pl.split_constants["SIZE"], pl.forward.B_c
    shape = COUNT[pl.type], pl.shape.rows // B_c, B_c, size
    K, V = (Split(rows(p, t), t.new_empty(shape, dtype=pl.type), t.new_empty(shape[1])) for t in (x.k, x.v))
    return K, V


def boxes(part: Split, pl: Plan) -> Descriptor:
    """Pieces as TMA sees them: row after row, in boxes of a tile."""
    count, blocks, B_c, size = part.pieces.shape
    return Descriptor(part.pieces, [count * blocks * B_c, size], [size, 1], [B_c, size], pl.keys)


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """o and lse."""
    saved = empty_saved(p, x, seed)
    stream = current_stream(x.q.device)
    for launch in forward_launches(p, pl, x, saved, counter(x.q.device, stream)):
        launch.run(stream)
    return saved


def backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """dq, dk, dv, and what extras want."""
    do = torch.zeros_like(saved.o) if do is None else addressable(do)
    grads, scratch = empty_grads(p, x), gradients.empty_scratch(p, x.q.device)
    extra, stream = list(grads.extra), current_stream(x.q.device)
    zeros = counter(x.q.device, stream)
    for launch in gradients.launches(p, pl, x, saved, do, dlse, scratch, grads, zeros):
        launch.run(stream)
    sink = len(extra) - 1 - 2 * p.recipe.varlen
    if p.recipe.sink and extra[sink] is not None:
        delta = by_row(p, gradients.ROWS_OF_DELTA, x, scratch.delta)
        extra[sink] = sink_gradient(x.extra[sink], saved.lse, delta).to(x.extra[sink].dtype)
    return grads._replace(extra=tuple(extra))
