"""Launch the fp32 kernels on Hopper: split operands into 16-bit pieces, then run attention on the pieces."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...call.backend import Plan as PassPlan
from ...call.operands import Grads, Operands, Saved
from ...call.problem import Problem, once
from ...host.arguments import (
    TINY,
    cdiv,
    lengths,
    odd_counts,
    packed,
    rows,
    unplanned,
    with_contiguous_lse,
)
from ...host.launch import Launch, current_stream
from ...host.lists import tile_lists
from ...host.outputs import empty_grads, empty_saved
from ...host.plan import Launched, plan_of
from ...host.tables import source_of_rows
from ...host.values import device_values
from ...tile.ranges import Variant
from ...tile.schedule import assign, assign_each
from ...tile.softmax import LOG2E
from ..counts import even_section, needs_mask_in_loop, processors
from ..descriptors import Box, Descriptor, addressable, blocks_box, box
from ..launch import counter, tensors_of
from ..plan import SECTION
from ..tiles import Fp32Forward, Kind, current_fp32, precision
from . import backward_launch as gradients
from . import forward as kernels

CACHED_KEYS = 32 << 20
"""Let matrices that run concurrently share at most this many bytes of K and V, which stay in the L2 cache."""
SAVED_SHARE = 256
"""Save pieces of K and V for the backward only if they take at most this part of the GPU's memory. A model has tens of
layers, and all save theirs at once."""
SAVED_KEYS = 8192
"""Save them only up to this many keys. Products grow with the square of the length, so that beyond it splitting again
costs almost nothing, and memory is what is short."""


@dataclass(frozen=True, eq=False)
class Plan(Launched):
    """Hold everything about a launch that follows from the problem alone."""

    forward: Fp32Forward
    kind: Kind
    c: float
    """Turns logits into base 2, as a factor."""
    q: Box
    """Describes q to TMA."""
    programs: int
    shape: kernels.Shape
    constants: dict[str, Any]
    saves: bool
    """Says whether pieces of K and V are saved for the backward."""


@once
def plan(p: Problem) -> Plan:
    """Compute a problem's tiles and constants from the table row in use."""
    return planned(p, current_fp32(p))


def planned(p: Problem, row: Fp32Forward) -> Plan:
    """Compute the same from any table row."""
    sizes, group = gradients.sizes_of(p), p.H // p.H_k
    kind, D, in_block = sizes.kind, sizes.tile.D, sizes.tile.B_C
    tiles, heads = cdiv(p.M, row.B_r), p.B * p.H
    of_keys = CACHED_KEYS // (p.N * 2 * D * 2 * kind.pieces) * group
    least = max(SECTION, of_keys, 4 * processors(p.q.device) // tiles)  # or programs would idle in the tail
    section = even_section(heads, least) if p.recipe.mask else 1
    tile = kernels.Tile(
        2, row.B_c, in_block, D, kind.pieces, row.kv_stages, row.q_separate, row.paired, row.pingpong,
        needs_mask_in_loop(p, 64, row.B_c), row.wait_pv, row.registers, kind.p_scale_log2,
    )  # fmt: skip
    shape = kernels.Shape(*lengths(p), p.D_v, p.H, group, heads, section, tiles, sizes.key_tiles, sizes.keys * in_block)
    return Plan(
        row, kind, max(p.scale, TINY) * LOG2E.value, box(p.q.shape, p.q.stride, 64, D, p),
        min(heads * tiles, processors(p.q.device)), shape,
        {"tile": tile, "order": assign if p.recipe.mask else assign_each, "num_warps": 4, "launch_pdl": True},
        saves(p),
    )  # fmt: skip


def saves(p: Problem) -> bool:
    """Return whether saving pieces of K and V for the backward is worth the memory."""
    sizes = gradients.sizes_of(p)
    size = 2 * sizes.kind.pieces * sizes.keys * sizes.tile.B_C * sizes.tile.D * 2
    return p.N <= SAVED_KEYS and size * SAVED_SHARE <= memory(p.q.device)


@lru_cache(64)
def memory(device: torch.device) -> int:
    """Return the GPU's memory in bytes, or an H200's if there is no GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 139 << 30


def forward_launches(
    p: Problem, pl: Plan, x: Operands, saved: Saved, keys: gradients.Keys, counter: Tensor
) -> list[Launch]:
    """Return the launches: list tiles if needed, split K and V into pieces, then attention, which begins while these
    are made."""
    parts, _, sink = device_values(p, x.extra)
    lists, listing = tile_lists(p, pl, pl.forward, parts, x, by_key=False)
    scales = (keys.k_descale, keys.v_descale) if pl.kind.type == torch.float16 else (None, None)
    B_c = pl.forward.B_c
    k_pair = gradients.boxes(keys.k, 2, B_c) if pl.forward.paired else None
    k, v = boxes(keys.k, B_c), boxes(keys.v, B_c)
    arguments = (
        Descriptor(x.q, pl.q), k, k_pair, v, *scales, rows(saved.o), saved.lse, counter,
        packed(p, x), Variant(parts, (), None, lists, sink), pl.c, odd_counts(pl.shape),
    )  # fmt: skip
    attend = Launch(kernels.attention_forward_fp32, pl.programs, arguments, pl.constants, pl.compiled)
    return [*listing, gradients.split_launch(p, pl, x, keys, saved), attend]


def boxes(pieces: Tensor, B_c: int) -> Descriptor:
    """Describe pieces to TMA, row after row, in boxes of a tile."""
    size = pieces.shape[-1]
    return Descriptor(pieces, blocks_box((pieces.numel() // size, size), (B_c, size), pieces.dtype))


def forward(p: Problem, pl: Plan, x: Operands, seed: Tensor | None) -> Saved:
    """Compute o, lse and pieces of K and V, and save the pieces if the plan says so."""
    saved = empty_saved(p, x, seed)
    keys, stream = gradients.empty_keys(p, x.q.device), current_stream(x.q.device)
    zeros = counter(x.q.device, stream)
    tensors = [*x[:3], *x.extra, *saved[:3], *keys, zeros]
    pl.replays[0](stream, tensors, lambda: forward_launches(p, pl, x, saved, keys, zeros))
    return saved._replace(extra=keys) if pl.saves else saved


def forward_plan(p: Problem) -> PassPlan:
    """Return how the forward runs."""
    pl = plan(p)
    return plan_of(p, pl, forward, describe_forward, ((pl.forward, False),))


def backward_plan(p: Problem) -> PassPlan:
    """Return how the backward runs."""
    return plan_of(p, plan(p), backward, describe_backward, ((gradients.sizes_of(p).row, True),))


def describe_forward(p: Problem, pl: Plan) -> list[str]:
    """Describe tiles and products of the forward."""
    return [f"forward {pl.forward.B_r}x{pl.forward.B_c}, 2 warpgroups", *describe_backward(p, pl)]


def describe_backward(p: Problem, pl: Plan) -> list[str]:
    """Describe the products."""
    return [f"products in {precision(p)}", source_of_rows(p.q.device)]


def backward(p: Problem, pl: Plan, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """Compute dq, dk, dv, and the gradients that extra tensors want."""
    do = torch.zeros_like(saved.o) if do is None else addressable(do)
    saved, dlse = with_contiguous_lse(saved, dlse)
    grads, scratch = empty_grads(p, x), gradients.empty_scratch(p, x.q.device, gradients.saved_keys(p, saved))
    stream = current_stream(x.q.device)
    zeros = counter(x.q.device, stream)
    own: tuple[Any, ...] = scratch.q, scratch.do, *scratch.keys, *scratch.scales, *tensors_of(scratch.rows), zeros
    tensors = [*x[:3], *x.extra, *saved[:3], do, dlse, *own, *grads[:3], *grads.extra]
    replay = pl.replays[unplanned(saved, do, dlse), scratch.from_forward]
    replay(stream, tensors, lambda: gradients.launches(p, pl, x, saved, do, dlse, scratch, grads, zeros))
    return grads
