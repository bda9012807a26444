"""Draw the comparison of two trainings."""

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..pages.plots import COLOURS, STYLE
from .comparison import NAMES, Comparison
from .contests import FP32_EPSILON


def training(c: Comparison, path: Path) -> None:
    """Draw losses overlaid, their difference, time and peak memory, side by side."""
    with mpl.rc_context(STYLE):
        figure, (losses, difference, time, memory) = plt.subplots(
            1, 4, figsize=(13, 3.4), width_ratios=(3, 3, 1.3, 1.3), constrained_layout=True
        )
        _losses(losses, c)
        _difference(difference, c)
        _bars(time, [c.time_s[name] for name in NAMES], "time, s")
        _bars(memory, [c.peak_bytes[name] / 1e6 for name in NAMES], "peak memory, MB")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _losses(axes: Any, c: Comparison) -> None:
    steps = range(1, len(c.differences) + 1)
    axes.plot(steps, c.losses["standard"], color=COLOURS["standard"], lw=5, alpha=0.55, label="standard attention")
    axes.plot(steps, c.losses["tilewise"], color=COLOURS["tilewise"], lw=1.4, label="tilewise")
    axes.set_title("loss, nats a byte")
    axes.set_xlabel("step")
    axes.legend(frameon=False)


def _difference(axes: Any, c: Comparison) -> None:
    """Draw the difference and the spacing of fp32 numbers at the size of the loss, which limits it."""
    steps = range(1, len(c.differences) + 1)
    spacing = [FP32_EPSILON * 2.0 ** math.floor(math.log2(loss)) for loss in c.losses["standard"]]
    axes.fill_between(steps, spacing, color="#e4e7ec", step="mid", label="one fp32 spacing of the loss")
    axes.plot(steps, c.differences, color=COLOURS["tilewise"], lw=1, marker="o", ms=2.5, label="difference")
    axes.set_title("difference of the losses")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1.35 * max(*spacing, *c.differences))
    axes.ticklabel_format(axis="y", scilimits=(0, 0))
    axes.legend(frameon=False, loc="upper left", ncols=2)


def _bars(axes: Any, heights: list[float], title: str) -> None:
    bars = axes.bar(NAMES, heights, color=[COLOURS[name] for name in NAMES], width=0.6)
    axes.bar_label(bars, fmt="%.0f" if max(heights) >= 100 else "%.1f", padding=2, color="#444444")
    axes.set_title(title)
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
