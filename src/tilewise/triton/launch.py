"""Launches: turn a problem and its operands into kernel arguments."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from ..call.operands import Codes, Grads, Operands, Saved
from ..call.problem import Problem
from ..host.arguments import (
    adjacent,
    cdiv,
    dropout,
    lengths,
    odd,
    packed,
    rows,
    unplanned,
    unused,
    with_adjacent_rows,
    with_contiguous_lse,
)
from ..host.bias import Recompute, renormalize_launch
from ..host.gather import add_sums, empty_sums, gather_launches
from ..host.launch import Launch, current_stream
from ..host.lists import tile_lists
from ..host.outputs import empty_grads, empty_saved, fill_empty, quantized, size
from ..host.repeat import Backward, repeated_backward
from ..host.sink import sink_launches
from ..host.values import device_values, with_lse_shift
from ..quantize.codes import blocks_of, columns
from ..tile.gradients import Factors
from ..tile.ranges import Scales, Variant
from ..tile.rows import Packed, RowValues
from ..tile.rows import Rows as RowsOf
from . import backward as kernels
from .chunked import launch as chunked
from .forward import attention_forward
from .plan import Plan, constants, schedule
from .tiles import Tiles

DELTA_ROWS = 64
DELTA_ROWS_WIDE = 16
"""Above head size 256, where more rows spill on gfx1100."""


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """Compute o and lse."""
    saved = empty_saved(p, x, seed)
    if 0 in (p.B, p.M):
        return fill_empty(saved)
    x = with_adjacent_rows(x)
    stream = current_stream(x.q.device)
    saved = saved._replace(extra=quantized(p, x, pl.compiled))
    tensors = [*x[:3], *x.extra, *saved[:3], *saved.extra]
    pl.replays[len(saved.extra)](stream, tensors, lambda: forward_launches(p, pl, x, saved))
    return saved


def backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """Compute dq, dk, dv, and the gradients that extras need."""
    grads = empty_grads(p, x)
    if 0 in (p.B, p.M):
        for grad in grads[:3]:
            grad.zero_()
    x = with_adjacent_rows(x)
    do = torch.zeros_like(saved.o) if do is None else adjacent(do)
    saved, dlse = with_contiguous_lse(saved, dlse)
    scratch, made = empty_scratch(p, x), chunked.workspace(p, x)
    stream = current_stream(x.q.device)
    sums = empty_sums(p, x, grads, pl.bias)
    tensors = [*x[:3], *x.extra, *saved[:3], do, dlse, *scratch, *made, *grads[:3], *grads.extra, *sums]
    replay = pl.replays[unplanned(saved, do, dlse)]
    replay(stream, tensors, lambda: backward_launches(p, pl, x, saved, do, dlse, scratch, grads, sums, made))
    add_sums(p, grads, sums, lambda: recompute(p, pl, x, saved, do, dlse, scratch, pl.bias), stream)
    return grads


def empty_scratch(p: Problem, x: Operands) -> RowValues:
    """Allocate scratch without writing it: two numbers per row."""
    logs, delta = (torch.empty(scratch_shape(p), dtype=torch.float32, device=x.q.device) for _ in range(2))
    return RowValues(logs, delta)


def scratch_shape(p: Problem) -> tuple[int, ...]:
    """Return the shape of a number per row, padded to the kernels' `pitch`."""
    return *p.q.shape[:-3], p.H, cdiv(lengths(p)[0], 16) * 16


def repeat_backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor) -> Backward | None:
    """Return what repeats a backward; None where it reads copies, another kernel before it, or a workspace."""
    if p.biased or pl.dkdv is None or 0 in (p.B, p.M) or any([adjacent(t) is not t for t in (*x[:3], do)]):
        return None
    row_values = size(torch.float32, prod(scratch_shape(p)))
    return repeated_backward(p, pl, (row_values, row_values), x, saved, do)


def forward_launches(p: Problem, pl: Plan, x: Operands, saved: Saved) -> Iterator[Launch]:
    """Yield the forward's launch; before it, one that lists tiles if the plan needs it."""
    parts, changes, sink = device_values(p, x.extra)
    lists, listing = tile_lists(p, pl, pl.forward, parts, x, by_key=False)
    yield from listing
    tiles, heads = cdiv(p.M, pl.forward.B_r), p.B * p.H
    q, k, v, o = (rows(t) for t in (*x[:3], saved.o))
    codes = None
    if saved.extra:
        made, size = Codes(*saved.extra), columns(p)
        q, k = RowsOf(made.q, 0, size, 0), RowsOf(made.k, 0, size, 0)
        of_v = () if made.v is None else (made.v.view(torch.int8), made.v_descale)
        of_q, of_k = blocks_of(p)
        codes = Scales(made.q_descale, made.k_descale, made.q_shift, odd(of_q), odd(of_k), of_v)
    arguments = (
        q, k, v, o, saved.lse, packed(p, x), unused(p, saved),
        Variant(parts, changes, dropout(p, saved.seed), lists, sink, codes), pl.c, *lengths(p), p.H,
        schedule(tiles, heads, pl.section),
    )  # fmt: skip
    yield Launch(attention_forward, heads * tiles, arguments, constants(p, pl, pl.forward), pl.compiled)


def backward_launches(
    p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: RowValues,
    grads: Grads, sums: Sequence[Tensor | None] = (), made: tuple[Tensor, ...] = (),
) -> Iterator[Launch]:  # fmt: skip
    """Yield launches for the row values (in scratch), the sink, dK and dV, dQ, and tensors of scores that learn. `made`
    is the workspace of chunks."""
    where, lse, key = packed(p, x), saved.lse, unplanned(saved, do, dlse)
    parts, changes, _ = device_values(p, x.extra)
    variant = Variant(parts, with_lse_shift(p, changes, lse, x.extra), dropout(p, saved.seed), None)

    delta_rows = DELTA_ROWS if p.D_v <= 256 else DELTA_ROWS_WIDE
    tiles, heads = cdiv(p.M, delta_rows), p.B * p.H
    arguments = (rows(saved.o), rows(do), dlse, lse, *scratch, where, unused(p, grads=grads), lengths(p)[0], p.H, tiles)
    sizes = {"d_v": p.D_v, "B_R": delta_rows}
    yield Launch(kernels.attention_backward_delta, heads * tiles, arguments, sizes, pl.compiled, key)
    yield from sink_launches(p, pl, x, lse, scratch.delta, 1, grads, key)

    given = (*(rows(t) for t in (*x[:3], do)), scratch)
    factors, shared = Factors(pl.unit, p.scale, 1.0), (p, pl, x, saved, do, dlse, scratch)
    if p.biased:
        yield renormalize_launch(recompute(*shared, pl.dq))

    if pl.dkdv is None:
        yield from chunked.launches(p, pl, given, made, grads, where, variant, factors, key)
    else:
        yield from tile_launches(p, pl, x, given, grads, where, variant, parts, factors, key)

    if sums:
        yield from gather_launches(recompute(*shared, pl.bias), sums)


def tile_launches(
    p: Problem, pl: Plan, x: Operands, given: tuple[Any, ...], grads: Grads, where: Packed | None, variant: Variant,
    parts: Any, factors: Factors, key: Any,
) -> Iterator[Launch]:  # fmt: skip
    """Yield the launches for dK and dV, by tiles of keys, and for dQ, by tiles of queries. `given`: Q, K, V, dO and row
    values."""
    M, N = lengths(p)
    of_keys, of_queries = cast("Tiles", pl.dkdv), pl.dq
    for kernel, row, by_key, count, H, results in (
        (kernels.attention_backward_dkdv, of_keys, True, cdiv(p.N, of_keys.B_c), p.H_k, grads[1:3]),
        (kernels.attention_backward_dq, of_queries, False, cdiv(p.M, of_queries.B_r), p.H, grads[:1]),
    ):
        lists, listing = tile_lists(p, pl, row, parts, x, by_key)
        yield from listing
        arguments = (
            *given, *map(rows, results), where, variant._replace(lists=lists), factors, M, N, H,
            schedule(count, p.B * H, pl.section),
        )  # fmt: skip
        yield Launch(kernel, p.B * H * count, arguments, constants(p, pl, row), pl.compiled, key)


def recompute(
    p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: RowValues, tiles: Tiles,
) -> Recompute:  # fmt: skip
    """Return what launches share that recompute S in tiles of a size."""
    parts, changes, _ = device_values(p, x.extra)
    variant = Variant(parts, with_lse_shift(p, changes, saved.lse, x.extra), dropout(p, saved.seed), None)
    given, stride = (*(rows(t) for t in (*x[:3], do)), scratch), scratch.logs.shape[-1]
    return Recompute(
        p, x.extra, given, saved.lse, variant, pl.unit, stride, 1, tiles, constants(p, pl, tiles), pl,
        unplanned(saved, do, dlse),
    )  # fmt: skip
