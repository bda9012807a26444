"""Draw the pictures of the accumulation study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..bench.tables import geometric_mean, length_label
from ..pages.plots import OUR_RED, STYLE, legend_below, save
from .measure import FACTOR, FITTED, IN_LOOP, PLAIN, SWEEPS, Combination, Finding, Point
from .speed import Time

TITLES = {
    "length": "keys",
    "scale": "scale of the logits",
    "channel": "size of one channel of q and k",
    "normalised": "the same, q and k normalised",
    "mean": "mean of v",
}
SHOWN: dict[Combination, tuple[str, str, str]] = {
    PLAIN: ("all in fp32", "#8d99ae", "-"),
    Combination(scores="fp16"): ("QK fp16", "#2e6f95", "-"),
    Combination(values="fp16"): ("PV fp16, delayed", OUR_RED, "-"),
    Combination(values="fp16", way=FACTOR): ("PV fp16, log factor", OUR_RED, "--"),
    Combination(values="fp16", way=FITTED): ("PV fp16, log factor for this V", "#e08e79", ":"),
    Combination(values="fp16", way=IN_LOOP): ("PV fp16, in-loop", "#7fb069", "-"),
    Combination(exp2="halves"): ("exp2 in halves", "#b08bbb", "-"),
}
"""The lines of the picture of errors."""


def value(sweep: str, point: Point) -> str:
    """Return where a point is on the axis of a sweep."""
    if sweep == "length":
        return length_label(point.length)
    return f"{getattr(point, 'channel' if sweep == 'normalised' else sweep):g}"


def ratios_of(times: Sequence[Time], head_size: int) -> dict[str, list[float]]:
    """Return times over those of fp32 sums, by implementation, one for each length."""
    mine = [t for t in times if t.on.head_size == head_size and t.milliseconds]
    plain = {t.on: t.milliseconds for t in mine if t.implementation == str(PLAIN)}
    found: dict[str, list[float]] = {}
    for t in mine:
        if t.milliseconds and (base := plain.get(t.on)):
            found.setdefault(t.implementation, []).append(t.milliseconds / base)
    return found


def pictures(found: dict[str, list[Any]], stem: Path) -> list[Path]:
    """Draw <stem>-errors.png and <stem>-speed.png, if there is something to draw."""
    drawn = []
    if sweeps := {name: rows for name, rows in found.items() if name in SWEEPS}:
        drawn.append(stem.with_name(f"{stem.name}-errors.png"))
        picture(sweeps, drawn[-1])
    if any(t.milliseconds for t in found.get("speed", ())):
        drawn.append(stem.with_name(f"{stem.name}-speed.png"))
        speed_picture(found["speed"], drawn[-1])
    return drawn


def picture(findings: dict[str, list[Finding]], path: Path) -> None:
    """Draw a panel for each sweep: errors, logarithmic; crosses on the upper edge are overflow."""
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(findings), figsize=(3.1 * len(findings) + 0.6, 3.5), sharey=True, squeeze=False
        )
        for axes, (sweep, found) in zip(panels[0], findings.items(), strict=True):
            points = list(dict.fromkeys(f.at for f in found))
            for index, (combination, (label, colour, dash)) in enumerate(SHOWN.items()):
                at = {f.at: f for f in found if f.of == combination}
                errors = [at[p].relative if p in at and at[p].relative is not None else math.nan for p in points]
                axes.plot(range(len(points)), errors, label=label, color=colour, ls=dash, marker="o", ms=3.5, lw=1.7)
                broken = [i for i, p in enumerate(points) if p in at and at[p].overflow]
                axes.plot(
                    broken, [0.98 - 0.045 * index] * len(broken), ls="", marker="x", ms=6, mew=1.8, color=colour,
                    transform=axes.get_xaxis_transform(),
                )  # fmt: skip
            axes.set_yscale("log")
            axes.set_xticks(range(len(points)), [value(sweep, p) for p in points])
            axes.set_xlabel(TITLES[sweep])
        low, high = panels[0][0].get_ylim()
        panels[0][0].set_ylim(low, high * (high / low) ** 0.45)
        panels[0][0].set_ylabel("error against fp64; crosses: overflow")
        legend_below(figure, panels[0][0], 4)
        save(figure, path)


def speed_picture(times: Sequence[Time], path: Path) -> None:
    """Draw a panel for each head size, with a bar for each kernel's time over that of fp32 sums; whiskers span the
    lengths."""
    sizes = list(dict.fromkeys(t.on.head_size for t in times))
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(sizes), figsize=(4.6 * len(sizes) + 2.4, 5.2), sharey=True, squeeze=False)
        for axes, size in zip(panels[0], sizes, strict=True):
            ratios = ratios_of(times, size)
            for index, (name, found) in enumerate(ratios.items()):
                mean = geometric_mean(found)
                colour = "#8d99ae" if name == str(PLAIN) else OUR_RED if name.startswith("QK") else "#2e6f95"
                axes.barh(index, mean, color=colour, height=0.72)
                axes.plot([min(found), max(found)], [index, index], color="#444444", lw=1.2)
                axes.annotate(
                    f"{mean:.2f}",
                    (max(mean, *found), index),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.set_yticks(range(len(ratios)), list(ratios))
            axes.set_ylim(len(ratios) - 0.4, -0.6)
            axes.axvline(1.0, color="#666666", lw=1, ls="--")
            axes.margins(x=0.12)
            axes.grid(axis="y", visible=False)
            axes.set_axisbelow(True)
            axes.set_title(f"head size {size}")
            axes.set_xlabel("time over that of fp32 sums")
        figure.tight_layout()
        save(figure, path)
