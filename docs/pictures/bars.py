"""The bar chart at the top of README.md: speed over cuDNN, from the kept results of an H200."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from studies.bench.results import OK, RESULTS, file_of, load, rows_of
from studies.bench.suites import BACKWARD, FORWARD
from studies.bench.tables import CUDNN, geometric_mean
from studies.pages.field import peers_of
from studies.pages.plots import COLOURS

FILE = file_of(RESULTS, "nvidia-h200")
LENGTHS = (4096, 16384)
"""Those at which the run has FlexAttention, too."""
SIZES = (64, 128, 256)
PASSES = (FORWARD, BACKWARD)
BARS = {
    "tilewise": "tilewise",
    "tilewise triton": "tilewise, Triton kernels",
    "flex": "FlexAttention",
    "flash-attn 2": "FlashAttention-2",
    "flash-attn 3": "FlashAttention-3",
    "flash-attn 4": "FlashAttention-4",
}
"""What a colour stands for, in the order of the bars."""
OURS = {"tilewise": "tilewise", "tilewise triton": "tilewise triton", "flex": "flex", "sdpa flash": "flash-attn 2"}
"""Implementations of our run, and their bars; PyTorch brings FlashAttention-2 as `sdpa flash`."""
THEIRS = {"fa3": "flash-attn 3", "fa4": "flash-attn 4"}
"""Columns of the run of FlashAttention-3 and -4, and their bars."""
Bar = tuple[str, int, str]
"""Pass, head size, name."""


class Theme(NamedTuple):
    """The colours of a page, and what must differ on it."""

    paper: str
    ink: str
    grid: str
    bars: Mapping[str, str] = {}


LIGHT = Theme("#ffffff", "#333333", "#e6e6e6")
DARK = Theme("#0d1117", "#d0d7de", "#2b3138", {"flash-attn 4": "#b0744a"})


def speeds(file: Path = FILE) -> dict[Bar, float]:
    """Speed over cuDNN in the same run: geometric means of the shapes; without bars that lack one of them."""
    found: dict[Bar, list[float]] = {}
    times: dict[Any, dict[str, float]] = {}
    for row in rows_of(load(file), "paper"):
        if row.status == OK and row.of.length in LENGTHS and row.milliseconds:
            times.setdefault((row.pass_, row.of), {})[row.implementation] = row.milliseconds
    for (pass_, case), of in times.items():
        for name, bar in OURS.items():
            if name in of:
                found.setdefault((pass_, case.head_size, bar), []).append(of[CUDNN] / of[name])
    for row in (peers_of(file) or {"rows": []})["rows"]:
        for pass_, suffix in ((FORWARD, ""), (BACKWARD, "_bwd")):
            for name, bar in THEIRS.items():
                if row["N"] in LENGTHS and name + suffix in row:
                    ratio = row[name + suffix] / row[f"cudnn{suffix}"]
                    found.setdefault((pass_, row["D"], bar), []).append(ratio)
    shapes = 2 * len(LENGTHS)
    return {bar: geometric_mean(ratios) for bar, ratios in found.items() if len(ratios) == shapes}


def chart(theme: Theme = LIGHT) -> Any:
    """A panel for each pass, a group of bars for each head size."""
    found = speeds()
    figure, panels = plt.subplots(2, 1, figsize=(8.2, 4.8), sharex=True, sharey=True, constrained_layout=True)
    width = 0.9 / len(BARS)
    for axes, pass_ in zip(panels, PASSES, strict=True):
        for index, (name, label) in enumerate(BARS.items()):
            heights = {size: found[pass_, size, name] for size in SIZES if (pass_, size, name) in found}
            places = [SIZES.index(size) + (index - (len(BARS) - 1) / 2) * width for size in heights]
            colour = theme.bars.get(name, COLOURS[name])
            drawn = axes.bar(places, list(heights.values()), width * 0.92, label=label, color=colour)
            weight = "bold" if name == "tilewise" else "normal"
            axes.bar_label(
                drawn, fmt="%.2f", fontsize=9, padding=3, color=theme.ink, fontweight=weight,
                bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
        axes.axhline(1.0, color=theme.ink, lw=1, ls="--", label="cuDNN", zorder=0.5)
        axes.set_title(pass_.capitalize(), color=theme.ink)
        axes.set_ylabel("speed over cuDNN", color=theme.ink)
        axes.set_xticks(range(len(SIZES)), [f"head size {size}" for size in SIZES])
        axes.set_ylim(0, 1.6)
        axes.set_yticks([0, 0.5, 1.0, 1.5])
        axes.tick_params(colors=theme.ink, length=0)
        axes.grid(axis="x", visible=False)
        axes.grid(axis="y", color=theme.grid)
        axes.set_axisbelow(True)
        axes.set_facecolor(theme.paper)
        for spine in axes.spines.values():
            spine.set_color(theme.grid)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=4, labelcolor=theme.ink)
    figure.set_facecolor(theme.paper)
    return figure


def dark_chart() -> Any:
    """The same for a dark page."""
    return chart(DARK)


PICTURES = {"readme-light": chart, "readme-dark": dark_chart}
