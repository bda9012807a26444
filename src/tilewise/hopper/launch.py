"""Launch the 16-bit Hopper kernels: turn a problem and its operands into descriptors and kernel arguments."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.backend import Plan as PassPlan
from ..call.operands import Codes, Grads, Operands, Saved
from ..call.problem import Problem
from ..host.arguments import (
    adjacent,
    batch_of,
    cdiv,
    dropout,
    lengths,
    odd,
    odd_counts,
    packed,
    rows,
    unplanned,
    unused,
    with_contiguous_lse,
)
from ..host.bias import Recompute, renormalize_launch
from ..host.gather import add_sums, empty_sums, gather_launches
from ..host.launch import Launch, current_stream
from ..host.lists import tile_lists
from ..host.outputs import empty_grads, empty_saved, quantized
from ..host.plan import plan_of
from ..host.repeat import Backward, repeated, repeated_backward
from ..host.sink import sink_launches
from ..host.tables import source_of_rows
from ..host.values import device_values, with_lse_shift
from ..quantize.codes import blocks_of
from ..tile.blocks import Tile
from ..tile.ranges import Variant
from ..tile.rows import Packed, RowValues
from .backward import preprocess
from .backward import scores as backward_scores
from .descriptors import Descriptor, addressable
from .forward import kernel as kernels
from .forward.eight_bits import Codes as Scales
from .parts import scores
from .parts.pieces import pieces_of
from .plan import FULL, Plan, mixed, plan, rest_of
from .tiles import BIAS, padded

COUNTERS: dict[tuple[torch.device, int | None], Tensor] = {}
"""Keeps each stream's counter for good: a kernel may still count when Python is done with its launch."""
SPARE: dict[torch.device, Iterator[Tensor]] = {}
"""Gives CAPTURED launches a counter each, by device. Later ones zero their own in the graph, which takes 2 to 3 us."""
CAPTURED = 1024
ADDRESSES: dict[torch.device, dict[int | None, int]] = {}
"""Keeps their addresses, by device and stream."""


def forward_launches(p: Problem, pl: Plan, x: Operands, saved: Saved, counter: Tensor) -> list[Launch]:
    """Return one launch, and one before it if tiles are listed. With 8-bit products, `saved` holds the codes."""
    parts, changes, sink = device_values(p, x.extra, scores)
    lists, listing = tile_lists(p, pl, pl.forward, parts, x, by_key=False)
    variant = Variant(parts, changes, dropout(p, saved.seed), lists, sink)
    (q, k, v), scales = x[:3], None
    if saved.extra:
        codes = Codes(*saved.extra)
        q, k, v = codes.q, codes.k, v if codes.v is None else codes.v
        scales = Scales(codes.q_descale, codes.q_shift, codes.k_descale, codes.v_descale, *map(odd, blocks_of(p)))
    of_q, of_k, of_v, of_o, *_ = pl.boxes
    where, page = packed(p, x), pl.constants["tile"].PAGE
    cache = None if page is None else batch_of(p, x, least=FULL if mixed(p) else None)
    wide = p.out_dtype != p.dtype  # its descriptor then gives the type of products alone
    of_rows = rows(saved.o) if wide or where is not None else None
    arguments = (
        Descriptor(q, of_q), Descriptor(k, of_k), Descriptor(v, of_v), scales,
        Descriptor(x.q if wide else saved.o, of_o), of_rows, saved.lse, counter, where, cache, unused(p, saved),
        variant, pl.forward_c, odd_counts(pl.shape),
    )  # fmt: skip
    return [*listing, Launch(kernels.attention_forward, pl.programs, arguments, pl.constants, pl.compiled)]


def backward_launches(
    p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: Any, grads: Grads,
    counter: Tensor, sums: Sequence[Tensor | None] = (),
) -> list[Launch]:  # fmt: skip
    """Return the launches: lists of tiles, preprocess, those of by_keys or by_gradient, then those for what learns."""
    where, lse, key = packed(p, x), saved.lse, unplanned(saved, do, dlse)
    parts, changes, _ = device_values(p, x.extra, backward_scores)
    lists, listing = tile_lists(p, pl, pl.backward, parts, x, by_key=True)
    variant = Variant(parts, changes, dropout(p, saved.seed), lists)
    before = preprocess_launch(p, pl, saved.o, do, dlse, lse, scratch, grads, where, key)
    order, main = pl.way.launches(p, pl, x, do, scratch, grads, counter, where, variant, key)
    renormalize, gathers = [], []
    if p.biased or sums:
        again = recompute(p, pl, x, saved, do, dlse, scratch)
        renormalize = [renormalize_launch(again)] if p.biased else []
        gathers = [*gather_launches(again, sums)] if sums else []
    sink = sink_launches(p, pl, x, lse, scratch.delta, pl.backward.B_r, grads, key)
    return [*listing, *order, before, *renormalize, *main, *gathers, *sink]


def preprocess_launch(
    p: Problem, pl: Plan, o: Tensor, do: Tensor, dL: Tensor | None, lse: Tensor, scratch: Any, grads: Grads,
    where: Packed | None, key: Any,
) -> Launch:  # fmt: skip
    """Return the preprocess launch, which writes row values and zeros."""
    row, D, tile = pl.backward, padded(p), pl.backward_tile
    per_program = 2048 // D
    tiles = cdiv(cdiv(p.M, row.B_r) * row.B_r, per_program)
    written, zeroed, count = pl.way.zeros(p, pl, scratch)
    arguments = (
        rows(o), rows(do), dL, lse, written, where, unused(p, grads=grads), lengths(p)[0], p.H, tiles,
        pl.backward_shape.blocks, tile.GROUP, zeroed, count,
    )  # fmt: skip
    constants = {"tile": preprocess.Tile(p.D_v, row.B_r, per_program, D, tile.D)}
    return Launch(preprocess.attention_backward_preprocess, p.B * p.H * tiles, arguments, constants, pl.compiled, key)


def recompute(
    p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor, dlse: Tensor | None, scratch: Any
) -> Recompute:
    """Return what launches for row sums of P and for tensors of scores share. These are Triton kernels, which call
    Triton's masks and scores."""
    parts, changes, _ = device_values(p, x.extra)
    variant = Variant(parts, with_lse_shift(p, changes, saved.lse, x.extra), dropout(p, saved.seed), None)
    operands = (*(rows(adjacent(t)) for t in (*x[:3], do)), RowValues(*scratch[:2]))
    tiles, block = BIAS[padded(p)], pl.backward.B_r
    tile = Tile(p.H // p.H_k, p.D, p.D_v, tiles.B_r, tiles.B_c, "ieee")
    constants = {"tile": tile, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return Recompute(
        p, x.extra, operands, saved.lse, variant, pl.c, pl.backward_shape.blocks * block, block, tiles, constants, pl,
        unplanned(saved, do, dlse),
    )  # fmt: skip


def tensors_of(scratch: Any) -> list[Any]:
    """Return all tensors of a scratch, and None in place of some, in the order of `scratch_sizes`."""
    return [t for part in scratch for t in (part if isinstance(part, tuple) else (part,))]


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """Compute o and lse."""
    saved, device = empty_saved(p, x, seed), x.q.device
    stream = current_stream(device)
    saved = saved._replace(extra=quantized(p, x, pl.compiled))
    zeros = counter(device, stream)
    tensors = [*x[:3], *x.extra, *saved[:3], *saved.extra, zeros]
    pl.replays[len(saved.extra)](stream, tensors, lambda: forward_launches(p, pl, x, saved, zeros))
    return saved


def forward_plan(p: Problem) -> PassPlan:
    """Return how the forward runs; short sequences of a pack are left to the portable kernels."""
    pl = plan(p)
    repeat = partial(repeated, counters=addresses_of(p.q.device))
    return plan_of(p, pl, forward, describe_forward, ((pl.forward, False),), repeat, rest_of(p))


def backward_plan(p: Problem) -> PassPlan:
    """Return how the backward runs."""
    pl = plan(p)
    return plan_of(p, pl, backward, describe_backward, ((pl.backward, True),), repeat_backward)


def describe_forward(p: Problem, pl: Plan) -> list[str]:
    """Describe the tiles of the forward, and for keys in a cache its programs and look-ups."""
    row, page, tile = pl.forward, p.layout.page(p), pl.constants["tile"]
    found = [f"forward {row.B_r}x{row.B_c}, {row.warpgroups} warpgroup{'s' * (row.warpgroups > 1)}"]
    found += in_pieces(tile)
    wide = f"V in {tile.V_PARTS} x {tile.D_V} columns; backward on the portable kernels"
    found += [wide] * (pl.backward is None)
    if page is not None:
        found.append(f"{pl.programs} programs, keys not split")
    if page:
        looked = row.B_c // pl.boxes[1].block_shape[2]
        found.append(f"pages of {page}, {looked} look-up{'s' * (looked > 1)} a tile")
    if mixed(p):
        found.append(f"sequences of fewer than {FULL} queries on the portable kernel")
    return [*found, source_of_rows(p.q.device)]


def describe_backward(p: Problem, pl: Plan) -> list[str]:
    """Describe the tiles of the backward."""
    row, tile = pl.backward, pl.backward_tile
    split, *memory = pl.way.describe(p, tile, pl.backward_shape)
    return [f"backward {row.B_r}x{row.B_c}, {split}", *memory, *in_pieces(tile), source_of_rows(p.q.device)]


def in_pieces(tile: Any) -> list[str]:
    """Tell of rows in several pieces."""
    pieces: Any = pieces_of(tile.D)
    return [f"rows of {tile.D} and {tile.D_V} columns in pieces"] * (len(pieces) > 1)


def repeat_backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor) -> Backward | None:
    """Return what repeats a backward; None if it needs more than new addresses."""
    if p.biased or addressable(do) is not do or (p.recipe.deterministic and pl.way.ORDERS_DQ):
        return None
    sizes = pl.way.scratch_sizes(p, pl.backward_tile, pl.backward_shape)
    return repeated_backward(p, pl, sizes, x, saved, do, addresses_of(do.device))


def backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """Compute dq, dk, dv, and the gradients that extra tensors want."""
    do = torch.zeros_like(saved.o) if do is None else addressable(do)
    saved, dlse = with_contiguous_lse(saved, dlse)
    grads, scratch = empty_grads(p, x), pl.empty_scratch(p, x.q.device)
    stream = current_stream(x.q.device)
    zeros = counter(x.q.device, stream)
    sums = empty_sums(p, x, grads, BIAS[padded(p)])
    tensors = [*x[:3], *x.extra, *saved[:3], do, dlse, *tensors_of(scratch), *grads[:3], *grads.extra, *sums, zeros]
    replay = pl.replays[unplanned(saved, do, dlse)]
    replay(stream, tensors, lambda: backward_launches(p, pl, x, saved, do, dlse, scratch, grads, zeros, sums))
    add_sums(p, grads, sums, lambda: recompute(p, pl, x, saved, do, dlse, scratch), stream)
    return grads


def counter(device: torch.device, stream: int | None) -> Tensor:
    """Return two zeros that a launch leaves as zeros: one pair per stream, and a separate pair per captured launch."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        found = next(SPARE.get(device, iter(())), None)
        return torch.zeros(2, dtype=torch.int32, device=device) if found is None else found
    if (zeros := COUNTERS.get((device, stream))) is None:
        zeros, *spare = new_counters(device, 1 if device in SPARE else 1 + CAPTURED)
        SPARE.setdefault(device, iter(spare))
        zeros = COUNTERS.setdefault((device, stream), zeros)
        addresses_of(device)[stream] = zeros.data_ptr()
    return zeros


def addresses_of(device: torch.device) -> dict[int | None, int]:
    """Return the addresses of a device's counters, by stream."""
    return ADDRESSES.setdefault(device, {})


def new_counters(device: torch.device, count: int) -> Sequence[Tensor]:
    """Allocate pairs of zeros in a separate thread, so that they may stay. This thread may allocate from a private
    pool: `torch.cuda.use_mem_pool`, or CUDA graphs of torch.compile, which warm up in theirs without capturing."""
    made = partial(torch.zeros, count, 4, dtype=torch.int32, device="cpu")
    with ThreadPoolExecutor(1) as thread:  # a copy from the CPU waits, so that every stream finds the zeros
        return thread.submit(lambda: [*made().to(device)[:, :2]]).result()
