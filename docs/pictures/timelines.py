"""Schedules as pictures: a lane for each kind of work, time from left to right."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from machine import Event, Span, busy, makespan, product
from matplotlib.patches import Rectangle
from pipelines import ADD, EXP, FMA, GROUPS, STAGES, TENSOR, TMA, Backward, Forward, channel, copy, order

GROUP = ("#d1495b", "#2e6f95")
"""Warpgroup 0, warpgroup 1."""
GREY, INK = "#8d99ae", "#333333"
HEADS = ("#d1495b", "#2e6f95", "#6a994e", "#7a5c99")
TEXT = 7
HEIGHT = 0.72
"""Of a bar in a lane of height 1."""

Lane = tuple[str, str, int | None]
"""What it is called, its units, and whose tasks, if only one group's."""
CYCLES = "cycles: computed from rates, not measured"


def name_lanes(axes: Any, names: Sequence[str]) -> None:
    """One lane below the other; lane y is at height y."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)


def bar(axes: Any, span: Span, y: float, colour: str, text: str, upright: bool = False) -> None:
    """A task from its start to its end."""
    axes.barh(y, span.end - span.start, HEIGHT, span.start, color=colour, ec="white", lw=0.6, zorder=2)
    axes.text(
        (span.start + span.end) / 2, y, text, ha="center", va="center", size=TEXT, color="white", linespacing=1.0,
        rotation=90 if upright else 0, zorder=3,
    )  # fmt: skip


def timeline(axes: Any, spans: Sequence[Span], lanes: Sequence[Lane]) -> None:
    """Each task in its lane."""
    length = makespan(spans)
    at: dict[Event, tuple[Span, int]] = {}
    for y, (_, units, group) in enumerate(lanes):
        for span in spans:
            if span.unit in units.split("+") and group in (None, span.group):
                at[span.over] = span, y
                cycles = span.end - span.start
                upright = cycles < 0.02 * length
                text = span.name.replace("(", "\n(") if not upright and cycles < 0.06 * length else span.name
                bar(axes, span, y, GREY if span.group is None else GROUP[span.group], text, upright)
    dependencies(axes, at)
    name_lanes(axes, [name for name, _, _ in lanes])
    for label, (_, _, group) in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set_color(INK if group is None else GROUP[group])


def dependencies(axes: Any, at: dict[Event, tuple[Span, int]]) -> None:
    """Lines to a task from what it needs in other lanes; from a load, which both groups need, to the first only."""
    used: set[Event] = set()
    for span, y in sorted(at.values(), key=lambda found: found[0].start):
        for before, y0 in (at[event] for event in span.needs if event in at):
            if y0 != y and before.over not in used:
                half = HEIGHT / 2 if y > y0 else -HEIGHT / 2
                axes.plot([before.end, span.start], [y0 + half, y - half], color=INK, lw=0.7, alpha=0.6, zorder=1)
            if before.group is None:
                used.add(before.over)


FORWARDS = (
    ("No overlap, all warps in step: in a long row the tensor cores are busy {:.0%} of the time", False, True),
    ("S and PV run while exponentials do, all warps still in step: {:.0%}", True, True),
    ("The kernel: S and PV run while exponentials do, and the warpgroups take turns: {:.0%}", True, False),
)
"""What it is, and `Forward`'s overlap and in_step."""


def forward_timeline() -> Any:
    """The same work with the kernel's two ideas, with one, and with none."""
    lanes = [
        ("TMA", TMA, None), ("tensor cores", TENSOR, None),
        *((f"exponentials,\nwarpgroup {w}", EXP, w) for w in GROUPS),
    ]  # fmt: skip
    figure, grid = plt.subplots(3, figsize=(7.8, 7.4), sharex=True)
    for axes, (title, overlap, in_step) in zip(grid, FORWARDS, strict=True):
        spans = Forward(64, 128, 3, overlap, in_step).run()
        timeline(axes, spans, lanes)
        axes.set_title(title.format(busy(Forward(64, 128, 64, overlap, in_step).run(), TENSOR)))
        axes.text(makespan(spans) + 50, 1, f"{makespan(spans):.0f} cycles", va="center", size=8.5, color=INK)
    grid[-1].set_xlim(-60, 7900)
    grid[-1].set_xlabel(CYCLES)
    figure.tight_layout()
    return figure


def backward_timeline() -> Any:
    """Both groups of `rows_of_keys`, the loads and the writer."""
    lanes = [
        ("TMA", TMA, None), ("tensor cores", TENSOR, None),
        *((f"exp and dS,\ngroup {w}", f"{EXP}+{FMA}", w) for w in GROUPS), ("add_dq", ADD, None),
    ]  # fmt: skip
    figure, axes = plt.subplots(figsize=(8.0, 3.9))
    timeline(axes, Backward(64, 128, 3).run(), lanes)
    axes.set_xlim(-60, 9700)
    axes.set_xlabel(CYCLES)
    return figure


def below(figure: Any, entries: Sequence[tuple[str, str]]) -> None:
    """A legend of colours."""
    handles = [Rectangle((0, 0), 1, 1, fc=colour, ec="#999999", lw=0.5) for _, colour in entries]
    figure.legend(
        handles, [name for name, _ in entries], loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False,
        ncols=len(entries),
    )  # fmt: skip


def channel_phases() -> Any:
    """Two stages: who holds the memory, and the phases of both barriers."""
    uses = 6
    spans = channel(uses, copy(128, 64), product(64, 128, 64))
    end = makespan(spans) + 300
    figure, axes = plt.subplots(figsize=(7.8, 4.2))
    ticks: dict[float, str] = {}
    for s in range(STAGES):
        memory, full, empty = 3.5 * s, 3.5 * s + 1, 3.5 * s + 2
        ticks |= {memory: f"stage {s}", full: f"full, {s}", empty: f"empty, {s}"}
        mine = [n for n in range(uses) if n % STAGES == s]
        fills = [span for n in mine for span in spans if span.name == f"fill {n}"]
        reads = [span for n in mine for span in spans if span.name == f"read {n}"]
        for n, span in zip(mine, fills, strict=True):
            bar(axes, span, memory, GREY, f"TMA fills\nuse {n}")
        for span in reads:
            bar(axes, span, memory, GROUP[span.group or 0], f"reads\nuse {span.name.split()[1]}")
        last = {span.name: span.end for span in reads}  # the group that reads last comes last
        for y, flips in ((full, [span.end for span in fills]), (empty, list(last.values()))):
            phases(axes, s, flips, y, end)
            axes.vlines(flips, memory + HEIGHT / 2, y, color=INK, lw=0.8, ls=":", zorder=1)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(6, -0.6)
    axes.set_xlim(-40, end)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.set_xlabel("time")
    below(figure, [(f"warpgroup {w}", GROUP[w]) for w in GROUPS])
    return figure


def phases(axes: Any, s: int, flips: Sequence[float], y: float, end: float) -> None:
    """The phases of a barrier of stage s: each use of the stage is one, and completing it begins the next."""
    for k, (a, b) in enumerate(zip([0.0, *flips], [*flips, end], strict=True)):
        n, phase = k * STAGES + s, k & 1
        colour = "#fbe3b5" if phase else "#f2f2f2"
        axes.barh(y, b - a, HEIGHT, a, color=colour, ec=INK, lw=0.6, zorder=2)
        axes.text((a + b) / 2, y, f"use {n}\nphase {phase}", ha="center", va="center", size=TEXT, color=INK, zorder=3)


def tile_order() -> Any:
    """Programs by time, with a fixed order and with the counter."""
    tiles, heads, programs = 8, 4, 6
    figure, grid = plt.subplots(2, figsize=(7.8, 4.8), sharex=True)
    for axes, (what, counter) in zip(grid, (("A fixed order", False), ("The counter", True)), strict=True):
        spans = order(tiles, heads, programs, heads, counter)
        for span in spans:
            h, i = span.name.split(", ")
            bar(axes, span, int(span.unit.split()[1]), HEADS[int(h)], i)
        ends = [max(span.end for span in spans if span.unit == f"program {p}") for p in range(programs)]
        axes.set_title(f"{what}: the first program is done at {min(ends):.0f}, the last at {max(ends):.0f}")
        name_lanes(axes, [f"program {p}" for p in range(programs)])
    grid[-1].set_xlabel("time in key tiles: computed, not measured")
    figure.tight_layout()
    below(figure, [(f"head {h}", HEADS[h]) for h in range(heads)])
    return figure
