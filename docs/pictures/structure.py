"""The structure of the package: its folders and top files by floors, as `tools/limits.py` counts them."""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import limits

HIGH, WIDE = 0.56, 0.92
"""A box's height and width, in units of a floor's height and of a place."""


def structure() -> Any:
    """Draws a box for each folder or top file, above all that it imports; a line leads to each of these."""
    above = limits.rooms()
    floors = limits.floors(above)
    rows = [sorted(room for room in above if floors[room] == n) for n in range(1, max(floors.values()) + 1)]
    width = max(map(len, rows))
    places = {room: ((x + 0.5) * width / len(row), y) for y, row in enumerate(rows) for x, room in enumerate(row)}
    figure, axes = plt.subplots(figsize=(8.0, 0.62 * len(rows) + 0.5))
    for room, (x, y) in places.items():
        for other in above[room]:
            to, floor = places[other]
            if floor < y:
                axes.plot([x, to], [y - HIGH / 2, floor + HIGH / 2], color="0.6", lw=0.5, alpha=0.45, zorder=1)
        box = Rectangle((x - WIDE / 2, y - HIGH / 2), WIDE, HIGH, fc="white", ec="tab:blue", lw=1.0, zorder=2)
        axes.add_patch(box)
        name = room if len(room) < 13 else room.replace("/", "/\n", 1)
        axes.text(x, y, name, ha="center", va="center", fontsize=6.3, zorder=3)
    axes.set(xlim=(0, width), ylim=(-0.6, len(rows) - 0.4))
    axes.axis("off")
    return figure
