"""Write the accuracy study as tables, pictures, sentences, and the sections of docs/results/accuracy.md."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..bench.accuracy import NAMES
from ..bench.results import OK
from ..bench.tables import STANDARD, folded, geometric_mean, is_ours, length_label
from ..pages.plots import COLOURS, STYLE, legend_below, save
from .measure import PART, SWEEPS, Finding, Point

TITLES = {
    "length": "length",
    "head_size": "head size",
    "scale": "scale of the logits",
    "outliers": "size of the outliers",
    "mean": "mean of k and v",
}
BASE = Point()


def value(sweep: str, point: Point) -> str:
    """Return where a point is on the axis of a sweep."""
    number = getattr(point, sweep)
    return length_label(number) if sweep == "length" else f"{number:g}"


def table(sweep: str, findings: Sequence[Finding], read: Callable[[Finding], Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head, and a line for each tensor and implementation that has a number."""
    points = list(dict.fromkeys(f.at for f in findings))
    lines = []
    for tensor in NAMES:
        first = True
        for name in dict.fromkeys(f.implementation for f in findings if f.status == OK):
            at = {f.at: read(f) for f in findings if f.implementation == name}
            cells = [f"{at[p][tensor]:.1e}" if at.get(p) else "-" for p in points]
            lines.append([tensor if first else "", name, *cells])
            first = False
    return ["", "", *(value(sweep, p) for p in points)], lines


def summary(findings: Sequence[Finding]) -> list[str]:
    """Say for each implementation, in a sentence, its errors over those of plain torch."""
    errors: dict[str, dict[Point, dict[str, float]]] = {}
    for f in findings:
        if f.relative:
            errors.setdefault(f.implementation, {})[f.at] = f.relative
    plain = errors.pop(STANDARD, {})
    lines = []
    for name, at in errors.items():
        ratios = {tensor: [at[p][tensor] / plain[p][tensor] for p in at] for tensor in NAMES}
        each = (
            f"{tensor} {_ratio(geometric_mean(r))} ({_ratio(max(r, key=_nan_first))})" for tensor, r in ratios.items()
        )
        lines.append(f"{name}: {', '.join(each)}.")
    return lines


def reasons(findings: Sequence[Finding]) -> list[str]:
    """Return who has no number, and why."""
    absent: dict[tuple[str, str], int] = {}
    for f in findings:
        if f.status != OK:
            absent[f.implementation, f.why or f.status] = absent.get((f.implementation, f.why or f.status), 0) + 1
    return [f"{name}: {why} ({count} points)" for (name, why), count in absent.items()]


def _nan_first(x: float) -> float:
    return math.inf if math.isnan(x) else x


def _ratio(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.0f}"


def picture(sweep: str, findings: Sequence[Finding], path: Path) -> None:
    """Draw a panel for each of o, dq, dk, dv: errors by what the sweep changes, logarithmic."""
    points = list(dict.fromkeys(f.at for f in findings))
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(NAMES), figsize=(13, 3.2), sharey=True)
        for axes, tensor in zip(panels, NAMES, strict=True):
            for name in dict.fromkeys(f.implementation for f in findings if f.status == OK):
                at = {f.at: f.relative[tensor] for f in findings if f.implementation == name and f.relative}
                places, ours = [points.index(p) for p in at], is_ours(name)
                axes.plot(
                    places, list(at.values()), label=name, color=COLOURS.get(name, "#555555"), marker="o",
                    lw=2.2 if ours else 1.5, ms=4.5 if ours else 3.5, ls="-" if ours else "--",
                )  # fmt: skip
            axes.set_yscale("log")
            axes.set_xticks(range(len(points)), [value(sweep, p) for p in points])
            axes.set_title(tensor)
            axes.set_xlabel(TITLES[sweep])
        panels[0].set_ylabel("error against fp64")
        legend_below(figure, panels[0], 6)
        save(figure, path)


def findings_of(content: dict[str, Any], sweep: str) -> list[Finding]:
    """Return the findings of a loaded results file."""
    return [Finding(**row) for row in content[PART][sweep]["rows"]]


def section(content: dict[str, Any], stem: Path, origin: Callable[[dict[str, Any], bool], str]) -> list[str]:
    """Return one device's part of the page; draw its pictures as <stem>-<sweep>.png."""
    sweeps = [sweep for sweep in SWEEPS if sweep in content[PART]]
    every = [finding for sweep in sweeps for finding in findings_of(content, sweep)]
    lines = [f"## {content['device']}\n"]
    lines += ["Errors over those of standard attention, in the geometric mean of all points (and at worst):\n"]
    lines += [*(f"- {line}" for line in summary(every)), ""]
    for sweep in sweeps:
        run, found = content[PART][sweep], findings_of(content, sweep)
        path = stem.with_name(f"{stem.name}-{sweep.replace('_', '-')}.png")
        picture(sweep, found, path)
        lines += [f"### By {TITLES[sweep]}\n", origin(run["environment"], run["partial"]) + "\n"]
        lines += [f"![Errors by {TITLES[sweep]}](../images/{path.name})\n"]
        lines += [folded(f"Errors by {TITLES[sweep]}", *table(sweep, found, lambda f: f.relative))]
        lines += [folded("Largest error over the largest entry", *table(sweep, found, lambda f: f.largest))]
    lines += ["Not measured:\n", *(f"- {note}" for note in reasons(every)), ""]
    return lines
