"""Compare trainings of one model at several context lengths."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from ..bench.tables import length_label, markdown
from ..pages.plots import COLOURS, STYLE, legend_below, save
from .contests import COLUMNS, Contest

SAME = ("batch", "layers", "heads", "width", "vocabulary", "matmul", "deterministic")
"""Settings that contests must share to stand side by side."""
METRICS = ("ms a step", "of it, %", "speedup", "peak GB")
"""Of COLUMNS; losses of different contexts are of different texts."""
ByContext = dict[int, Contest]


def side_by_side(contests: Sequence[Contest]) -> list[ByContext]:
    """Return contests that differ in their context, where there are several."""
    groups: dict[tuple, ByContext] = {}
    for c in contests:
        if c.finished:
            groups.setdefault(tuple(c.settings[name] for name in SAME), {})[c.settings["context"]] = c
    return [dict(sorted(group.items())) for group in groups.values() if len(group) > 1]


def names_of(group: ByContext) -> list[str]:
    """Return every attention that trained at some context."""
    return list(dict.fromkeys(name for c in group.values() for name in c.finished))


def table(group: ByContext) -> list[list[str]]:
    """Return a head, and for each metric and attention a line."""
    lines = [["", "attention", *map(length_label, group)]]
    at = {context: {line[0]: line for line in c.lines()} for context, c in group.items()}
    for metric in METRICS:
        for index, name in enumerate(names_of(group)):
            cells = [at[context][name][COLUMNS.index(metric)] if name in at[context] else "-" for context in group]
            lines.append(["" if index else metric, name, *cells])
    return lines


def picture(group: ByContext, path: Path) -> None:
    """Draw a step's time, attention's part of it, and peak memory; wide lines below narrow ones, so that all are
    visible."""
    names = names_of(group)
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(12, 3.4))
        reads = {
            "ms a step": lambda t: 1e3 * t.step_s,
            "attention's share of it, %": lambda t: 100 * t.share,
            "peak memory, GB": lambda t: t.end["peak_bytes"] / 1e9,
        }
        for axes, (title, read) in zip(panels, reads.items(), strict=True):
            for index, name in enumerate(names):
                trained = [place for place, c in enumerate(group.values()) if c.of(name)]
                heights = [statistics.fmean(map(read, c.of(name))) for c in group.values() if c.of(name)]
                width = 1.2 + 0.7 * (len(names) - index)
                axes.plot(trained, heights, label=name, color=COLOURS.get(name, "#555555"), lw=width)
            axes.set_xticks(range(len(group)), [length_label(context) for context in group])
            axes.set_xlabel("tokens of context")
            axes.set_title(title)
            if "%" in title:
                axes.set_ylim(0)
            else:  # a straight line of slope one is linear growth
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter("{x:g}")
        legend_below(figure, panels[0], 6)
        save(figure, path)


def section(contests: Sequence[Contest], stem: Path) -> list[str]:
    """Return the part of a device's trainings that compares contexts; draw its pictures as
    <stem>-contexts-<number>.png."""
    lines = []
    for number, group in enumerate(side_by_side(contests)):
        path = stem.with_name(f"{stem.name}-contexts-{number}.png")
        picture(group, path)
        head, *rows = table(group)
        batch = next(iter(group.values())).settings["batch"]
        lines += [f"### Training by context length, batch {batch}\n"]
        lines += [f"![Time, attention's share and memory by context length](../images/{path.name})\n"]
        lines += [markdown(head, rows), ""]
    return lines
