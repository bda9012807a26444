"""The pictures of docs/use/change-attention.md: what its functions show, and the tiles that are computed.

Functions are taken from the page, and tiles from the package: none is drawn by hand.
"""

import ast
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "src"))
import tilewise as tw
from tilewise.program import Entries
from tilewise.program.bounds import Grid, look, tiles

PAGE = Path(__file__).parents[1] / "use" / "change-attention.md"
SIDE, POOL, HEADS = 64, 8, 4
WIDTHS, MARGIN = (1.0, 1.0, 0.78), 12
CALLS = re.compile(r"attention\(|backward\(|^assert")
"""Lines that are left out."""
COLOURS = {"skipped": "#ffffff", "masked": "#e08e96", "whole": "#7fb5d8"}
MODS = {
    "alibi": "alibi", "t5": "t5", "forgetting": "forgetting", "sinks": "sinks", "documents": "own", "prefix": "prefix",
    "neighborhood": "neighborhood", "strided": "strided", "blocks": "blocks", "tree": "tree",
}  # fmt: skip
"""Names of pictures, and of the page's functions. Those of scores are causal, as on the page."""


@cache
def names_of_page() -> dict[str, Any]:
    """Return what the page defines, without running attention."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text().partition("## Combine")[0], re.M | re.S):
        lines = [line for line in ast.parse(code).body if not CALLS.search(ast.unparse(line))]
        exec(compile(ast.Module(lines, []), str(PAGE), "exec"), names)
    return names


def counted(mask: tw.Mask, M: int, N: int) -> Tensor:
    """Return of each tile of a head whether it is skipped, masked or whole: 0, 1 or 2."""
    found = mask.traced
    grid = Grid(1, HEADS, M, N, SIDE, SIDE, N - M if found.align == "last" else 0)
    args = found.program, found.tensors, found.numbers, grid
    some, every = [t[0, -1].int() for t in look(*args, *tiles(*args))]
    return some + every


def added(score: tw.Score, N: int) -> Tensor:
    """Return what a score adds to logits of one head, (N, N)."""
    with torch.no_grad():
        return score.apply(torch.zeros(1, HEADS, N, N), Entries.of(1, HEADS, N, N))[0, -1]


def mod(name: str) -> Any:
    """Draw the entries of a function, as shades of what a score adds, and its tiles with their numbers."""
    names = names_of_page()
    fn, N = names[MODS[name]], names["N"]
    M = names["T"] if name == "tree" else N
    is_score = fn.__code__.co_argcount == 5
    mask = tw.Causal() if is_score else tw.Mask.of(fn)
    seen = mask.dense(M, N, 1, HEADS).expand(1, HEADS, M, N)[0, -1]
    shade, of_tiles = seen.float(), counted(mask, M, N)
    if is_score:
        s = added(tw.Score.of(fn), N)
        shade = seen * (0.15 + 0.85 * (s - s[seen].min()) / (s[seen].max() - s[seen].min()))
    shade = torch.nn.functional.max_pool2d(shade[None], POOL)[0].mul(8).round()
    size = 5.3, 1.8 if M == N else 1.1
    figure, (left, right, legend) = plt.subplots(1, 3, figsize=size, width_ratios=WIDTHS, layout="constrained")
    left.imshow(shade.tolist(), cmap="Greys", vmin=0, vmax=10, extent=(0, N, M, 0))
    colours = ListedColormap(list(COLOURS.values()))
    right.imshow(of_tiles.tolist(), cmap=colours, vmin=0, vmax=2, extent=(0, N, M, 0))
    right.vlines(range(0, N + 1, SIDE), 0, M, color="#dddddd", lw=0.5)
    right.hlines(range(0, M + 1, SIDE), 0, N, color="#dddddd", lw=0.5)
    for axes, title in ((left, "entries"), (right, "tiles")):
        axes.set(xlim=(-MARGIN, N + MARGIN), ylim=(M + MARGIN, -MARGIN), xticks=[], yticks=[])
        axes.set_title(f"{title}, {M} x {N}", fontsize=11)
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
    handles = [Rectangle((0, 0), 1, 1, fc=colour, ec="#999999", lw=0.5) for colour in COLOURS.values()]
    numbers = [f"{int((of_tiles == n).sum())} {what}" for n, what in enumerate(COLOURS)]
    legend.legend(handles, numbers, loc="center", frameon=False, fontsize=12, handlelength=1, borderpad=0)
    legend.axis("off")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {f"mod-{name}": partial(mod, name) for name in MODS}
