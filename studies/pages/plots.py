"""Draw the pictures of a results file. Every function takes rows and the file to write."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..bench.costs import Cost, costs
from ..bench.peers import CHANGED
from ..bench.results import OK, OURS, Row
from ..bench.suites import BOTH, Case
from ..bench.tables import (
    EFFICIENT,
    RATE,
    SPEEDUP,
    STANDARD,
    describe,
    in_its_unit,
    length_label,
    ratios,
    setting,
    slowdown,
)

OUR_RED = "#d1495b"
COLOURS = {
    OURS: OUR_RED,
    "tilewise tiled": "#e8a0a8",
    "tilewise triton": "#e8a0a8",
    "tilewise ieee": "#6a1b2d",
    "tilewise bf16x6": "#a8324a",
    "tilewise fp16x3": OUR_RED,
    "tilewise tf32x3": "#e08e79",
    "tilewise bf16x3": "#edb99b",
    "tilewise tf32": "#f3d9b1",
    "standard tf32": "#c3cbd6",
    STANDARD: "#8d99ae",
    "sdpa": "#2e6f95",
    "sdpa cudnn": "#2e6f95",
    "sdpa flash": "#5fa8d3",
    "sdpa efficient": "#7fb069",
    "sdpa math": "#bdb2a7",
    "flex": "#b08bbb",
    "flash-attn 2": "#f2b134",
    "flash-attn 3": "#e07a1f",
    "flash-attn 4": "#7a4419",
}
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.edgecolor": "#999999",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "figure.dpi": 120,
    "savefig.bbox": "tight",
    "svg.hashsalt": "tilewise",
}


def rates(rows: Sequence[Row], path: Path) -> None:
    """Draw operations a second by length."""
    rows = [row for row in rows if row.status == OK]
    settings = list(dict.fromkeys(setting(row.of) for row in rows))
    passes = list(dict.fromkeys(row.pass_ for row in rows))
    metric = in_its_unit(RATE, rows)

    def draw(axes: Any, case: Case, pass_: str) -> None:
        mine = [row for row in rows if (setting(row.of), row.pass_) == (case, pass_)]
        _lines(axes, mine, metric.read)
        product = {row.of.length: (metric.read(row) or 0.0) / (row.of_matmul or 1.0) for row in mine}
        if max(product.values()) < 2 * max(metric.read(row) or 0.0 for row in mine):  # else it would squeeze the lines
            heights = [product[n] for n in sorted(product)]
            axes.plot(range(len(heights)), heights, color="#bbbbbb", ls=":", lw=1.4, label="matrix product")
        axes.set_ylim(0)
        axes.set_title(f"{describe(case)}\n{pass_}")

    _panels(settings, passes, draw, metric.title, path)


def memory(rows: Sequence[Row], path: Path) -> None:
    """Draw peak memory by length, both axes logarithmic: a slope of one is linear growth."""
    rows = [row for row in rows if row.status == OK and row.peak_bytes]
    settings = list(dict.fromkeys(setting(row.of) for row in rows))
    passes = list(dict.fromkeys(row.pass_ for row in rows))

    def draw(axes: Any, case: Case, pass_: str) -> None:
        mine = [row for row in rows if (setting(row.of), row.pass_) == (case, pass_)]
        _lines(axes, mine, lambda row: (row.peak_bytes or 0) / 1e6)
        axes.set_yscale("log")
        axes.set_title(f"{describe(case)}\n{pass_}")

    _panels(settings, passes, draw, "peak memory, MB", path)


def against_standard(rows: Sequence[Row], path: Path, read: Callable[[Row], float | None], ylabel: str) -> None:
    """Draw how many times less (time, memory) than standard attention, by length, one group of bars a setting."""
    found = ratios(rows, STANDARD, read)
    settings = list(dict.fromkeys(setting(row.of) for row in found))
    lengths = sorted({row.of.length for row in found})
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.6))
        width = 0.8 / max(1, len(settings))
        for index, case in enumerate(settings):
            heights = {row.of.length: r for row, r in found.items() if setting(row.of) == case}
            places = [lengths.index(n) + (index - (len(settings) - 1) / 2) * width for n in heights]
            bars = axes.bar(
                places,
                list(heights.values()),
                width * 0.94,
                label=describe(case),
                color=("#d1495b", "#2e6f95")[index % 2],
            )
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2, color="#444444")
        axes.axhline(1.0, color="#666666", lw=1, ls="--")
        axes.set_xticks(range(len(lengths)), [length_label(n) for n in lengths])
        axes.set_xlabel("tokens")
        axes.set_ylabel(ylabel)
        axes.grid(axis="x", visible=False)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
        axes.set_title(f"{BOTH}, against standard attention")
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        save(figure, path)


def worth(rows: Sequence[Row], path: Path) -> None:
    """Draw how many times longer every changed kernel takes, one panel a head size and kernel that was changed."""
    read = slowdown(rows).read
    found = [(row, ratio) for row in rows if (ratio := read(row))]
    sizes = sorted({row.of.head_size for row, _ in found})
    measured = {row.implementation for row, _ in found}
    names: dict[str, list[str]] = {}
    for name, peer in CHANGED.items():
        if name in measured:
            names.setdefault(peer, []).append(name)
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(names), len(sizes), figsize=(3.6 * len(sizes) + 1.2, 0.34 * sum(map(len, names.values())) + 1.9),
            height_ratios=[len(changes) for changes in names.values()], sharex="row", sharey="row", squeeze=False,
            constrained_layout=True,
        )  # fmt: skip
        for line, (peer, changes) in zip(grid, names.items(), strict=True):
            for axes, size in zip(line, sizes, strict=True):
                _dots(
                    axes, [(r, x) for r, x in found if r.of.head_size == size and r.implementation in changes], changes
                )
                axes.set_title(f"{peer}, head size {size}")
            if max(x for r, x in found if r.implementation in changes) > 3.0:
                line[0].set_xscale("log", base=2)
                line[0].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            line[0].set_ylim(len(changes) - 0.5, -0.5)
        for axes in grid[-1]:
            axes.set_xlabel("times the time of the kernel as it is")
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", frameon=False, ncols=len(handles)
        )
        save(figure, path)


def _dots(axes: Any, found: Sequence[tuple[Row, float]], names: Sequence[str]) -> None:
    """Draw a line for each change: a colour for each mask, hollow dots for the shorter lengths."""
    longest = max((row.of.length for row, _ in found), default=0)
    axes.axvline(1.0, color="#666666", lw=1, ls="--", zorder=1)
    for causal, length in sorted({(row.of.causal, row.of.length) for row, _ in found}):
        mine = [(row, ratio) for row, ratio in found if (row.of.causal, row.of.length) == (causal, length)]
        colour = COLOURS[OURS] if causal else COLOURS["sdpa"]
        axes.plot(
            [ratio for _, ratio in mine], [names.index(row.implementation) for row, _ in mine], ls="", marker="o",
            ms=6.5, color=colour, markerfacecolor=colour if length == longest else "white", zorder=3,
            label=f"{'causal' if causal else 'full'}, {length_label(length)} tokens",
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.08)
    axes.set_axisbelow(True)


def prices(rows: Sequence[Row], path: Path) -> None:
    """Draw the speed per visited tile that a variant leaves, one panel a pass, and the aims as ticks."""
    found = costs(rows)
    passes = list(dict.fromkeys(cost.row.pass_ for cost in found))
    labels = list(dict.fromkeys(map(_variant_label, found)))
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(passes), figsize=(4.4 * len(passes), 0.32 * len(labels) + 1.5), sharey=True, squeeze=False,
            constrained_layout=True,
        )  # fmt: skip
        for axes, pass_ in zip(grid[0], passes, strict=True):
            mine = [cost for cost in found if cost.row.pass_ == pass_]
            places = [labels.index(_variant_label(cost)) for cost in mine]
            bars = axes.barh(places, [cost.per_tile for cost in mine], 0.66, color=OUR_RED)
            axes.bar_label(bars, fmt="%.2f", fontsize=8, label_type="center", color="white")
            aims = [
                (at, cost.aim if cost.packed else cost.aim * cost.share)
                for at, cost in zip(places, mine, strict=True)
                if cost.aim
            ]
            axes.vlines(
                [aim for _, aim in aims], [at - 0.4 for at, _ in aims], [at + 0.4 for at, _ in aims], color="#222222",
                lw=1.8, label="aim",
            )  # fmt: skip
            axes.axvline(1.0, color="#666666", lw=1, ls="--", label="the plain call", zorder=0.5)
            axes.set_yticks(range(len(labels)), labels)
            axes.set_ylim(len(labels) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.12)
            axes.set_axisbelow(True)
            axes.set_title(pass_)
            axes.set_xlabel("speed per visited tile, in the plain call's")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=2)
        save(figure, path)


def _variant_label(cost: Cost) -> str:
    return cost.row.implementation + ("" if cost.row.of.causal else ", full mask")


def speedups(rows: Sequence[Row], path: Path) -> None:
    """Draw the speedup over PyTorch's memory-efficient kernel (or over standard attention where that did not run), by
    length, with a bar for each implementation."""
    base = EFFICIENT if any(row.implementation == EFFICIENT and row.status == OK for row in rows) else STANDARD
    metric = in_its_unit(SPEEDUP._replace(over=base), rows)
    rows = [row for row in rows if row.status == OK and row.implementation != base]
    names = list(dict.fromkeys(row.implementation for row in rows))
    width = 0.84 / max(1, len(names))

    def draw(axes: Any, case: Case, pass_: str) -> None:
        lengths = sorted({row.of.length for row in rows if setting(row.of) == case})
        for index, name in enumerate(names):
            mine = [row for row in rows if (row.implementation, row.pass_, setting(row.of)) == (name, pass_, case)]
            if not mine:
                continue
            places = [lengths.index(row.of.length) + (index - (len(names) - 1) / 2) * width for row in mine]
            heights = [metric.read(row) or 0.0 for row in mine]
            bars = axes.bar(places, heights, width * 0.92, label=name, color=COLOURS.get(name, "#555555"))
            axes.bar_label(bars, fmt="%.1f", fontsize=6.5, padding=1, color="#444444")
        axes.axhline(1.0, color="#666666", lw=1, ls="--", label=base)
        axes.set_xticks(range(len(lengths)), [length_label(n) for n in lengths])
        axes.grid(axis="x", visible=False)
        axes.set_axisbelow(True)
        axes.margins(y=0.12)
        axes.set_title(f"{describe(case)}\n{pass_}")

    passes = list(dict.fromkeys(row.pass_ for row in rows))
    settings = list(dict.fromkeys(setting(row.of) for row in rows))
    _panels(settings, passes, draw, f"times as fast as {base}", path, width=5.2)


def _lines(axes: Any, rows: Sequence[Row], read: Callable[[Row], float | None]) -> None:
    lengths = sorted({row.of.length for row in rows})
    for name in dict.fromkeys(row.implementation for row in rows):
        points = {row.of.length: read(row) for row in rows if row.implementation == name}
        ours = name in (OURS, "tilewise fp16x3", "tilewise bf16x6")
        axes.plot(
            [lengths.index(n) for n in points], list(points.values()), label=name, color=COLOURS.get(name, "#555555"),
            lw=2.6 if ours else 1.5, marker="o", ms=5 if ours else 3.5, zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_xticks(range(len(lengths)), [length_label(n) for n in lengths])


def _panels(
    settings: Sequence[Case],
    passes: Sequence[str],
    draw: Callable[[Any, Case, str], None],
    ylabel: str,
    path: Path,
    width: float = 3.3,
) -> None:
    """Draw panels above one legend.

    Settings that differ only in the mask share a line, forward panels before backward.
    """
    pairs = _pairs(settings)
    columns = len(passes) * max(len(pair) for pair in pairs)
    lines = len(pairs)
    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(lines, columns, figsize=(width * columns, 2.7 * lines + 0.4), squeeze=False)
        handles: dict[str, Any] = {}
        for line, pair in zip(grid, pairs, strict=True):
            for axes, (pass_, case) in zip(line, product(passes, pair), strict=False):
                draw(axes, case, pass_)
                handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            line[0].set_ylabel(ylabel)
        for axes in grid[-1]:
            axes.set_xlabel("tokens")
        figure.tight_layout()
        figure.legend(
            list(handles.values()), list(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False,
            ncols=min(6, 2 * columns, len(handles)),
        )  # fmt: skip
        save(figure, path)


def _pairs(settings: Sequence[Case]) -> list[list[Case]]:
    """Group settings that differ in the mask only."""
    pairs: dict[tuple[str, int], list[Case]] = {}
    for case in settings:
        pairs.setdefault((case.dtype, case.head_size), []).append(case)
    return list(pairs.values())


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def legend_below(figure: Any, panel: Any, columns: int) -> None:
    """Put one panel's legend below all panels, in that many columns at most."""
    handles, labels = panel.get_legend_handles_labels()
    figure.tight_layout()
    ncols = min(columns, len(labels))
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, ncols=ncols)


PICTURES: dict[str, tuple[tuple[str, str, Callable[[Sequence[Row], Path], None]], ...]] = {
    "paper": (("rate", "Arithmetic a second, by length", rates),),
    "classic": (
        (
            "speedup", "Speedup over standard attention",
            lambda rows, path: against_standard(
                rows, path, lambda row: row.milliseconds, "times faster"
            ),
        ),
        (
            "memory", "Memory saved against standard attention",
            lambda rows, path: against_standard(
                rows, path, lambda row: row.peak_bytes, "times less memory"
            ),
        ),
    ),
    "long": (("rate", "Arithmetic a second, by length", rates), ("memory", "Peak memory, by length", memory)),
    "ablation": (("worth", "What each technique is worth: time with one change", worth),),
    "variants": (("cost", "What each variant costs: speed per visited tile, causal unless it says full mask", prices),),
    "short": (("rate", "Arithmetic a second, by length", rates),),
    "cpu": (("rate", "Arithmetic a second, by length", rates),),
    "short-cpu": (),
    "llmc": (
        ("speedup", "Speedup over PyTorch's memory-efficient kernel", speedups),
        ("rate", "Arithmetic a second, by length, compared with the card's fp32 matrix product", rates),
    ),
}  # fmt: skip
"""Of each suite: a name for the file, what it shows, and how to draw it."""


def draw(suite: str, rows: Sequence[Row], stem: Path) -> list[tuple[Path, str]]:
    """Draw a suite's pictures as <stem>-<name>.png; return their paths and what they show."""
    if not any(row.status == OK for row in rows):
        return []
    drawn = []
    for name, shows, picture in PICTURES.get(suite, ()):
        path = stem.with_name(f"{stem.name}-{name}.png")
        picture(rows, path)
        drawn.append((path, shows))
    return drawn
