"""python docs/pictures/draw.py: the pictures of docs/hopper.md and docs/learn, anew, into docs/images."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from flow import backward_flow
from learn import PICTURES as LEARN
from matplotlib.text import Text
from timelines import backward_timeline, channel_phases, forward_timeline, tile_order

from tilewise.bench.plots import STYLE

PICTURES: dict[str, Callable[[], Any]] = {
    "hopper-forward": forward_timeline,
    "hopper-channel": channel_phases,
    "hopper-order": tile_order,
    "hopper-backward": backward_timeline,
    "hopper-backward-flow": backward_flow,
    **LEARN,
}


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
    return paths


def words(figure: Any) -> str:
    """What stands in a picture; the file keeps it, so that one whose numbers have changed since is found."""
    figure.canvas.draw()  # axes have no labels before
    return "\n".join(text for part in figure.findobj(Text) if (text := part.get_text()))


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images"):
        print(path)
