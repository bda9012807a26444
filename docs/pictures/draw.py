"""python docs/pictures/draw.py: draws the pictures of docs/internals, docs/learn, docs/use and README.md."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).parents[2]))
import palette
from bars import PICTURES as BARS
from flow import backward_flow
from learn import PICTURES as LEARN
from matplotlib.text import Text
from mods import PICTURES as MODS
from parallel import who_sends_what
from structure import structure
from timelines import backward_timeline, channel_phases, forward_timeline, tile_order

from studies.pages.plots import STYLE

PICTURES: dict[str, Callable[[], Any]] = {
    "hopper-forward": forward_timeline,
    "hopper-channel": channel_phases,
    "hopper-order": tile_order,
    "hopper-backward": backward_timeline,
    "hopper-backward-flow": backward_flow,
    "parallel-who-sends-what": who_sends_what,
    "structure": structure,
    **LEARN,
    **MODS,
}
VECTORS: Any = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"]}
"""How an svg is written: its text stays text, in a font that the reader has."""


def draw(folder: Path) -> list[Path]:
    """Writes every picture; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in PICTURES.items():
        with mpl.rc_context(STYLE):
            figure = picture()
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], metadata={"Software": None, "Description": words(figure)})
            plt.close(figure)
    for name, picture in BARS.items():
        with mpl.rc_context(STYLE | VECTORS):
            figure = picture()
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], metadata={"Date": None, "Creator": None, "Description": words(figure)})
            plt.close(figure)
    return paths


def words(figure: Any) -> str:
    """What stands in a picture; the file keeps it, so that one whose numbers have changed since is found."""
    figure.draw_without_rendering()  # axes have no labels before
    return "\n".join(text for part in figure.findobj(Text) if (text := part.get_text()))


def main(images: Path) -> None:
    """Draws all, and replaces those that show something else now."""
    with TemporaryDirectory() as folder:
        for path in draw(Path(folder)):
            if palette.replace(path, images / path.name):
                print(images / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images")
