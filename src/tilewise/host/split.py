"""Launch kernels that split keys: what both GPU back ends share, results, workspace and the kernel that combines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call.backend import Plan
from ..call.operands import Operands, Saved
from ..call.problem import Problem
from ..tile.combine import attention_combine
from ..tile.line import Split
from ..tile.ranges import Variant
from ..tile.softmax import LOG2E
from .arguments import batch_of, cdiv, power_of_2, rows, rows_of_lse, scale_of, sequences_in_line
from .launch import Launch, current_stream
from .outputs import empty, empty_saved, fill_empty
from .plan import Launched, plan_of
from .repeat import repeated
from .values import device_values

COMBINED = 16
"""Partial sums that are added at a time."""
Launches = Callable[[Problem, Any, Operands, Saved, Tensor], list[Launch]]


@dataclass(frozen=True, eq=False)
class SplitPlan(Launched):
    """What follows from the problem alone; a machine adds its tiles, or boxes."""

    split: Split
    programs: int
    """The programs of each key head."""
    partial: int
    """Numbers of all partial sums; 0 if there are none."""


def plan_split(p: Problem, pl: Any, launches: Launches, describe: Callable[..., Sequence[str]]) -> Plan:
    """Return how a forward runs by kernels that split keys."""
    return plan_of(p, pl, partial(forward, launches), describe, repeat=partial(repeated, sums=partial_sums(pl)))


def forward(
    launches: Launches, p: Problem, pl: Any, x: Operands, seed: Tensor | None, given: Saved | None = None
) -> Saved:
    """Compute o and lse by a plan's kernels, as new tensors or in those that are given."""
    saved = given or empty_saved(p, x, seed)
    if 0 in (p.B, p.queries):
        return fill_empty(saved)
    device = x.q.device
    stream, sums = current_stream(device), empty(partial_sums(pl), device)
    tensors = *x[:3], *x.extra, saved.o, saved.lse, sums
    pl.replays[0](stream, tensors, lambda: launches(p, pl, x, saved, sums))
    return saved


def partial_sums(pl: Any) -> Any:
    """Return the size of what a plan's partial sums are kept in."""
    return (pl.partial,), (1,), torch.float32


def row_tiles(p: Problem, B_r: int) -> int:
    """Return how many tiles of rows a key head has, at most."""
    return p.B * cdiv(p.M * (p.H // p.H_k), B_r)


def numbers(p: Problem, split: Split, W: int) -> int:
    """Return how many fp32 numbers all partial sums have. There are none where each program sums as many whole tiles of
    rows, all with as many keys."""
    tiles = row_tiles(p, split.B_R)
    if split.CHUNK:
        slots = p.queries * split.G * (cdiv(p.N, split.CHUNK) + 1)
    elif not p.extra and tiles % W == 0 and tiles * split.B_C >= W * split.LEAST:
        slots = 0
    else:
        slots = 2 * W * split.B_R
    return slots * p.H_k * (p.D_v + 2)


def planned(
    p: Problem, W: int, B_r: int, B_c: int, chunk: int, least: int, stages: int, precision: str, **kinds: bool
) -> tuple[Split, int, int]:
    """Return the fields of a SplitPlan with W programs; the others are those of Split."""
    page, line = p.layout.page(p) or 0, sequences_in_line(p.B)
    split = Split(p.H // p.H_k, p.D, p.D_v, page, B_r, B_c, chunk, line, least, stages, precision, **kinds)
    return split, W, numbers(p, split, W)


def describe(p: Problem, pl: Any, warps: str, look_ups: int) -> list[str]:
    """Describe tiles, programs and sums; with pages, also the look-ups of a tile."""
    split, W = pl.split, pl.programs
    sums = f"at most {2 * W} partial sums" if pl.partial else "no partial sums"
    pages = [f"pages of {split.P}, {look_ups} look-up{'s' * (look_ups > 1)} a tile"] if split.P else []
    return [
        f"forward splits keys, {split.B_R} rows of {split.G} heads x {split.B_C} keys, {warps}, {split.STAGES} stages",
        f"{W} programs for each of {p.H_k} key heads", f"pieces of {split.CHUNK} keys" if split.CHUNK else sums, *pages,
    ]  # fmt: skip


def dividing(p: Problem, B_r: int, W: int) -> int:
    """Return W, or a slightly smaller number that divides the sequences, if one does: each program takes whole ones
    where all are equal."""
    return next((w for w in range(W, W - W // 8, -1) if row_tiles(p, B_r) == p.B and p.B % w == 0), W)


def launches_of(
    p: Problem, pl: SplitPlan, x: Operands, saved: Saved, partial: Tensor, kernel: Any, inputs: Sequence[Any],
    scales: Sequence[Any], constants: dict[str, Any],
) -> list[Launch]:  # fmt: skip
    """Return the launch of a kernel that sums pieces of the keys, and the one that adds up what it leaves, if it does.

    `inputs`: q, k and v as the kernel takes them. `scales`: what it takes before the factor on the logits, if anything.
    """
    parts, changes, sink = device_values(p, x.extra)
    variant = Variant(parts, changes, None, None, sink)
    both = rows(saved.o), rows_of_lse(saved.lse), partial, batch_of(p, x, most=p.layout.most), variant
    arguments = (*inputs, *both, *scales, scale_of(p) * LOG2E.value, p.H_k, pl.programs)
    found = [Launch(kernel, pl.programs * p.H_k, arguments, {"split": pl.split, **constants}, pl.compiled)]
    if pl.partial:
        constants = {"B_X": COMBINED, "num_warps": power_of_2(cdiv(p.D_v, 128)), "split": pl.split, **pdl(pl.split)}
        arguments = (*both, p.H_k, pl.programs)
        found.append(Launch(attention_combine, p.queries * p.H, arguments, constants, pl.compiled))
    return found


def pdl(split: Split) -> dict[str, bool]:
    """Return the option by which a kernel may begin while the one before ends, if the chip knows it."""
    return {"launch_pdl": True} if split.HOPPER else {}
