"""The backward's data flow: which tile lies where, and what makes it."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from pipelines import GROUPS
from timelines import INK, below

PALE = ("#f8dfe3", "#d6e6f0")
"""Registers of group 0, of group 1."""
SHARED, MEMORY = "#e3e6ec", "#ffffff"
S_CHAIN = ("$S^T = K\\,Q^T$", "$P^T$", "$dV$ += $P^T dO$"), ("exp2(S \u2212 lse)", "")
DP_CHAIN = ("$dP^T = V\\,dO^T$", "$dS^T$", "$dK$ += $dS^T Q$"), ("P (dP \u2212 delta)", "")
COLUMNS = (1.0, 4.1, 7.0)
WIDTH, LOW = 1.7, 0.5
"""Of a box."""


def box(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    """What lies somewhere: its colour tells where."""
    shape = {"boxstyle": "round,pad=0,rounding_size=0.06", "fc": colour, "ec": "#888888", "lw": 0.8, "zorder": 2}
    axes.add_patch(FancyBboxPatch((x - WIDTH / 2, y - LOW / 2), WIDTH, LOW, **shape))
    axes.text(x, y, text, ha="center", va="center", size=8, color=INK, linespacing=1.1, zorder=3)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    """From one point to another, with what happens on the way above it."""
    style = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style, zorder=1)
    axes.text(
        (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.04, text, ha="center", va="bottom", size=7, color=INK
    )


def chain(axes: Any, y: float, group: int, tiles: Sequence[str], steps: Sequence[str]) -> None:
    """Tiles in a group's registers, and what makes each from the one before."""
    for k, (x, tile) in enumerate(zip(COLUMNS, tiles, strict=True)):
        box(axes, x, y, tile, PALE[group])
        if k:
            arrow(axes, (COLUMNS[k - 1] + WIDTH / 2, y), (x - WIDTH / 2, y), steps[k - 1])


def pieces(axes: Any, y: float, names: Sequence[str], shared: tuple[float, float]) -> None:
    """dQ from dS in shared memory: each group's piece, which add_dq adds to the sums."""
    box(axes, 9.4, y, "pieces of dQ", SHARED)
    box(axes, 12.2, y, "sums of dQ", MEMORY)
    arrow(axes, (9.4 + WIDTH / 2, y), (12.2 - WIDTH / 2, y), "add_dq")
    for w, name in enumerate(names):
        at = y + (w - 0.5) * 0.7
        box(axes, COLUMNS[2], at, name, PALE[w])
        arrow(axes, shared, (COLUMNS[2] - WIDTH / 2, at))
        arrow(axes, (COLUMNS[2] + WIDTH / 2, at), (9.4 - WIDTH / 2, y))


def operands(axes: Any, y: float, inner: Sequence[float], outer: Sequence[float]) -> None:
    """What TMA brings, and the products that begin with it."""
    x, edge = COLUMNS[0], COLUMNS[0] - WIDTH / 2
    box(axes, x, y, "K, V; Q, dO", SHARED)
    for at in inner:
        side = LOW / 2 if at > y else -LOW / 2
        arrow(axes, (x, y + side), (x, at - side))
    for at in outer:
        axes.plot([edge, edge - 0.3, edge - 0.3], [y, y, at], color=INK, lw=0.9, zorder=1)
        arrow(axes, (edge - 0.3, at), (edge, at))


def flow_of_rows(axes: Any) -> None:
    """Each group has half of the keys."""
    axes.set_title("to head size 128: each group has half of the keys, the groups exchange dS")
    x = COLUMNS[1]
    for w, (outer, inner) in zip(GROUPS, ((0.0, 0.85), (4.55, 3.7)), strict=True):
        sign = 1 if w == 0 else -1
        chain(axes, outer, w, *S_CHAIN)
        chain(axes, inner, w, *DP_CHAIN)
        arrow(axes, (x, outer + sign * LOW / 2), (x, inner - sign * LOW / 2))
        arrow(axes, (x, inner + sign * LOW / 2), (x, 2.275 - sign * LOW / 2))
    operands(axes, 2.275, inner=(0.85, 3.7), outer=(0.0, 4.55))
    box(axes, x, 2.275, "dS, two stages", SHARED)
    pieces(axes, 2.275, ["$dQ = dS\\,K$"] * 2, (x + WIDTH / 2, 2.275))
    axes.set_ylim(4.9, -0.35)


def flow_of_gradients(axes: Any) -> None:
    """Each group has a gradient, and half of dQ's rows later."""
    axes.set_title("beyond: each group has a gradient, and dQ = dS K comes later, from memory")
    top, middle, bottom = 0.0, 1.4, 2.8
    chain(axes, top, 0, *S_CHAIN)
    chain(axes, bottom, 1, *DP_CHAIN)
    operands(axes, middle, inner=(top, bottom), outer=())
    p, ds = COLUMNS[1] - 0.95, COLUMNS[1] + 0.95
    box(axes, p, middle, "P", SHARED)
    box(axes, ds, middle, "dS", SHARED)
    arrow(axes, (p + 0.3, top + LOW / 2), (p + 0.3, middle - LOW / 2))
    arrow(axes, (p + 0.3, middle + LOW / 2), (p + 0.3, bottom - LOW / 2))
    arrow(axes, (ds - 0.3, bottom - LOW / 2), (ds - 0.3, middle + LOW / 2))
    kept, summed, stored = 7.4, 9.8, 12.2
    box(axes, kept, middle, "dS of a chunk", MEMORY)
    box(axes, stored, middle, "dQ", MEMORY)
    arrow(axes, (ds + WIDTH / 2, middle), (kept - WIDTH / 2, middle), "store")
    for w in GROUPS:
        at = middle + (w - 0.5) * 0.7
        box(axes, summed, at, "$dQ$ += $dS\\,K$", PALE[w])
        arrow(axes, (kept + WIDTH / 2, middle), (summed - WIDTH / 2, at))
        arrow(axes, (summed + WIDTH / 2, at), (stored - WIDTH / 2, middle))
    axes.set_ylim(3.15, -0.35)


def backward_flow() -> Any:
    """The five products between registers and shared memory, shared out in both ways."""
    figure, (rows, gradients) = plt.subplots(2, figsize=(7.8, 5.6), height_ratios=[5.25, 3.5])
    flow_of_rows(rows)
    flow_of_gradients(gradients)
    for axes in (rows, gradients):
        axes.set_xlim(-0.4, 13.1)
        axes.set_axis_off()
    figure.tight_layout()
    below(
        figure,
        [
            ("registers of group 0", PALE[0]), ("registers of group 1", PALE[1]), ("shared memory", SHARED),
            ("memory", MEMORY),
        ],
    )  # fmt: skip
    return figure
