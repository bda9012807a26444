"""The pictures of docs/learn: counts and errors from runs of the code that the pages show, times from results files."""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle
from timelines import GREY, GROUP, HEADS, INK, below

from studies.bench.results import RESULTS, file_of, load

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "minimal"))
sys.path.insert(0, str(Path(__file__).parents[1] / "learn"))
import flash1
import flash2
import fp8
import naive
import online_softmax
from traffic import Lines, counted

RED, BLUE = GROUP
PROCESSORS = 132
"""Of an H100 or H200."""


def passes() -> Any:
    """What each line of standard attention moves, and what must move at least."""
    N, d = 2048, 64
    Q, K, V = torch.randn(3, 1, N, d)
    with Lines() as lines:
        naive.attention(Q, K, V)
    large = [moved / (Q.itemsize * N * N) for _, moved in lines.moved if moved > N * N]
    names = ("S = Q @ K.mT", "S * d**-0.5", "S.amax", "S - m", "torch.exp", "P.sum", "P / l", "P @ V", "Q, K, V and O")
    heights = [*large, 4 * d / N]
    colours = [RED, *[GREY] * 6, RED, BLUE]
    figure, axes = plt.subplots(figsize=(7.2, 3.5))
    bars = axes.barh(names, heights, 0.7, color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3, size=8.5, color=INK)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for name in axes.get_yticklabels()[:-1]:
        name.set_fontfamily("monospace")
    axes.set_xlabel("numbers read and written, in times of N x N")
    axes.set_title(f"Standard attention, N = {N}, d = {d}: counted while it ran, {sum(large):.1f} in all")
    below(figure, [("matrix products", RED), ("everything else", GREY), ("what has to move", BLUE)])
    return figure


def online() -> Any:
    """One row of S, and what m, l and alpha do as its pieces come."""
    pieces, width = 12, 16
    torch.manual_seed(4)
    S = torch.randn(pieces, width) * 1.3 + torch.linspace(-1, 1.2, pieces)[:, None]
    m, l = torch.full((1,), -torch.inf), torch.zeros(1)
    kept: dict[str, list[float]] = {"m": [], "l": [], "alpha": []}
    for piece in S:
        _, alpha, m, l = online_softmax.online_softmax(piece, m, l)
        for name, value in (("m", m), ("l", l), ("alpha", alpha)):
            kept[name].append(value.item())
    figure, grid = plt.subplots(3, figsize=(7.2, 5.4), sharex=True, height_ratios=[2.2, 1.2, 1.2])
    edges = torch.arange(pieces + 1) * width
    grid[0].plot(torch.arange(pieces * width) + 0.5, S.flatten(), ".", ms=3.5, color=GREY, label="S, one row")
    grid[0].stairs(kept["m"], edges, color=RED, lw=2, baseline=None, label="m")
    grid[1].bar(edges[:-1] + width / 2, kept["alpha"], width * 0.9, color=BLUE)
    grid[1].set_ylim(0, 1.1)
    grid[2].bar(edges[:-1] + width / 2, kept["l"], width * 0.9, color=HEADS[2])
    for axes, name in zip(grid, ("logits", "alpha", "l"), strict=True):
        axes.set_ylabel(name)
        axes.set_xticks(edges)
        axes.set_xlim(0, pieces * width)
        axes.grid(axis="y", visible=False)
        axes.set_axisbelow(True)
    grid[0].legend(frameon=False, loc="lower right", ncols=2)
    grid[0].set_title("A new maximum: alpha < 1 shrinks what was summed before")
    grid[-1].set_xlabel("keys, in pieces of 16")
    figure.align_ylabels()
    figure.tight_layout()
    return figure


def traffic() -> Any:
    """Bytes against the size of the outer tile, counted while both loops ran."""
    N, d = 4096, 64
    Q, K, V = torch.empty(3, 1, N, d, dtype=torch.float16, device="meta")  # shapes are enough to count
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    first = [counted(flash1.attention, Q, K, V, B_r=N, B_c=B) / 1e6 for B in sizes]  # the inner tile's size is free
    second = [counted(flash2.attention, Q, K, V, B_r=B, B_c=N) / 1e6 for B in sizes]
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    axes.axhline(naive.bytes_moved(1, N, N, d, 2) / 1e6, color=GREY, lw=2, ls="--", label="standard attention")
    axes.plot(sizes, first, "o-", color=BLUE, lw=2, label="FlashAttention-1's order, by key tile")
    axes.plot(sizes, second, "o-", color=RED, lw=2, label="FlashAttention-2's order, by query tile")
    axes.axhline(4 * Q.nbytes / 1e6, color=INK, lw=1.4, ls=":", label="Q, K, V and O once")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("rows of the outer loop's tile")
    axes.set_ylabel("MB to and from slow memory")
    axes.set_title(f"One head, N = {N}, d = {d}, 16 bits")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def loops() -> Any:
    """The order in which both algorithms visit the tiles of S, and which tile of O is at work."""
    tiles = 4
    figure, grid = plt.subplots(1, 2, figsize=(7.2, 3.7))
    titles = "FlashAttention-1: keys outside", "FlashAttention-2: queries outside"
    for axes, title, by_keys in zip(grid, titles, (True, False), strict=True):
        visits = [(b, a) if by_keys else (a, b) for a in range(tiles) for b in range(tiles)]
        for number, (i, j) in enumerate(visits):
            axes.add_patch(Rectangle((j, i), 1, 1, fc=HEADS[i], alpha=0.45, ec="white", lw=2))
            axes.text(j + 0.5, i + 0.5, str(number + 1), ha="center", va="center", size=11, color=INK)
        centres = [(j + 0.5, i + 0.5) for i, j in visits]
        for (x0, y0), (x1, y1) in pairwise(centres):
            style = {"arrowstyle": "->", "color": INK, "lw": 0.8, "shrinkA": 9, "shrinkB": 9, "alpha": 0.55}
            axes.annotate("", (x1, y1), (x0, y0), arrowprops=style)
        arrivals = sum(here != there for (here, _), (there, _) in zip(visits, [(-1, -1), *visits], strict=False))
        axes.set_title(f"{title}\nTiles of O come to the chip {arrivals} times")
        axes.set_xlim(0, tiles)
        axes.set_ylim(tiles, 0)
        axes.set_aspect("equal")
        axes.set_xticks([t + 0.5 for t in range(tiles)], [f"K{t}, V{t}" for t in range(tiles)])
        axes.set_yticks([t + 0.5 for t in range(tiles)], [f"Q{t}, O{t}" for t in range(tiles)])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    figure.tight_layout()
    return figure


def measured(suite: str, length: int = 4096) -> dict[tuple[str, int], float]:
    """By implementation and head size: the forward's rate relative to a large matrix product's, bf16, no mask."""
    rows = load(file_of(RESULTS, "nvidia-h200"))["suites"][suite]["rows"]
    return {
        (row["implementation"], row["case"]["head_size"]): row["of_matmul"]
        for row in rows
        if row["status"] == "ok" and row["pass_"] == "forward" and row["case"]["length"] == length
        if row["case"]["dtype"] == "bf16" and not row["case"]["causal"]
    }


def bars(axes: Any, rows: Sequence[tuple[str, Sequence[float | None]]], labels: Sequence[str]) -> None:
    """Groups of horizontal bars, one a head size."""
    height = 0.8 / len(labels)
    for x, (label, colour) in enumerate(zip(labels, (RED, BLUE, HEADS[2]), strict=False)):
        places = [y + (x - (len(labels) - 1) / 2) * height for y in range(len(rows))]
        values = [row[1][x] or 0.0 for row in rows]
        drawn = axes.barh(places, values, height * 0.92, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.2f", padding=3, size=8, color=INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("rate relative to a large matrix product, measured in the same rounds")
    axes.legend(frameon=False, loc="upper right")


def steps() -> Any:
    """From standard attention to the last page, measured."""
    sizes = (64, 128)
    rate = measured("ablation")
    found = [("standard attention", [measured("paper").get(("standard", d)) for d in sizes])]
    for name, key in (
        ("FlashAttention-1's order,\nin Triton", "triton, keys outside"),
        ("FlashAttention-2's order,\nin Triton", "tilewise triton"),
        ("on Hopper's instructions,\nwarps without roles", "without warp roles"),
        ("warps with roles\n(tilewise on Hopper)", "tilewise"),
    ):
        found.append((name, [rate.get((key, d)) for d in sizes]))
    figure, axes = plt.subplots(figsize=(7.2, 4.0))
    bars(axes, found, [f"head size {d}" for d in sizes])
    axes.set_xlim(0, 1)
    axes.set_title("Forward on an H200, bf16, 4k tokens, no mask")
    return figure


def order() -> Any:
    """The order of the loops and the number of warps, both in Triton."""
    sizes = (64, 128, 256)
    rate = measured("ablation")
    names = {
        "triton, keys outside": "keys outside,\none program a head",
        "triton, 4 warps": "queries outside,\n4 warps",
        "triton, 8 warps": "queries outside,\n8 warps",
    }
    # the kernel as it is has one of these numbers of warps, and is not measured twice
    usual = {d: rate.get(("tilewise triton", d)) for d in sizes}
    found = []
    for key, name in names.items():
        values = [rate.get((key, d)) for d in sizes]
        found.append(
            (name, [usual[d] if v is None and "warps" in key else v for d, v in zip(sizes, values, strict=True)])
        )
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    bars(axes, found, [f"head size {d}" for d in sizes])
    axes.set_xlim(0, 1)
    axes.set_title("One Triton kernel in three forms, H200, bf16, 4k tokens, no mask")
    return figure


def occupancy() -> Any:
    """How many of the multiprocessors work, one program a head against one a tile of queries."""
    N, B_r = 8192, 128
    heads = list(range(1, 265))

    def share(programs: int) -> float:
        return programs / (-(-programs // PROCESSORS) * PROCESSORS)

    figure, axes = plt.subplots(figsize=(7.2, 3.3))
    axes.plot(heads, [share(h) for h in heads], color=BLUE, lw=1.8, label="one program a head")
    axes.plot(
        heads, [share(h * N // B_r) for h in heads], color=RED, lw=1.8, label=f"one program a tile of {B_r} queries"
    )
    axes.set_ylim(0, 1.05)
    axes.set_xlim(0, 264)
    axes.set_xticks(range(0, 265, 33))
    axes.set_xlabel("batch x heads")
    axes.set_ylabel("share of them at work")
    axes.set_title(f"{PROCESSORS} multiprocessors, {N} queries, programs of equal length: computed")
    axes.legend(frameon=False, loc="lower right")
    return figure


PALE = ("#ecb3bb", "#a3c0d3", "#bdd1b1", "#c3b4d2")
"""Of four warps."""


def piece(axes: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    """Of a matrix."""
    axes.add_patch(Rectangle((x, y), width, height, fc=colour, ec="white", lw=2))
    label(axes, x + width / 2, y + height / 2, text, rotation=90 if height > 2 * width else 0)


def label(axes: Any, x: float, y: float, text: str, **how: Any) -> None:
    """Around a point."""
    axes.text(x, y, text, ha="center", va="center", size=8.5, color=INK, **how)


def keys_cut(axes: Any) -> None:
    """Each warp has columns of S, and a sum for every row of O."""
    axes.set_title("Keys cut: FlashAttention-1")
    for w, colour in enumerate(PALE):
        piece(axes, w, -1.1, 1, 0.8, colour)
        piece(axes, w, 0, 1, 4, colour, f"warp {w}")
        piece(axes, 5.2 + 0.22 * w, 0.22 * w, 2.6, 4, colour)
    label(axes, 2, -0.7, "K, V: a quarter each")
    label(axes, 6.83, 5.1, "O: four sums of all rows,\nadded through shared memory")


def queries_cut(axes: Any) -> None:
    """Each warp has rows of S and the same rows of O."""
    axes.set_title("Queries cut: FlashAttention-2")
    piece(axes, 0, -1.1, 4, 0.8, "#e3e6ec", "K, V: each warp reads all")
    for w, colour in enumerate(PALE):
        piece(axes, 0, w, 4, 1, colour, f"warp {w}")
        piece(axes, 5.2, w, 2.6, 1, colour)
    label(axes, 6.5, 4.45, "O: separate rows")


def warps() -> Any:
    """Both ways to share a tile out."""
    figure, grid = plt.subplots(1, 2, figsize=(8.0, 3.5))
    for axes, cut in zip(grid, (keys_cut, queries_cut), strict=True):
        cut(axes)
        label(axes, 2, 4.45, "S")
        axes.set_xlim(-0.2, 9.2)
        axes.set_ylim(5.8, -1.4)
        axes.set_aspect("equal")
        axes.set_axis_off()
    figure.tight_layout()
    return figure


def low_precision() -> Any:
    """The error of 8-bit attention, by the size of rare large entries."""
    N, d, heads = 512, 64, 8
    sizes = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0]
    errors: dict[str, list[float]] = {}
    for size in sizes:
        g = torch.Generator().manual_seed(0)
        Q, K, V = (fp8.with_outliers(heads, N, d, size=size, generator=g) for _ in range(3))
        R = fp8.rotation(d, g)
        truth = naive.attention(Q, K, V)
        for name, O in (
            ("fp8, one scale a head", fp8.attention(Q, K, V, N)),
            ("fp8, one scale for 64 rows", fp8.attention(Q, K, V, 64)),
            ("fp8, one scale for 64 rows, Q and K rotated", fp8.attention(Q, K, V, 64, R)),
        ):
            errors.setdefault(name, []).append((torch.norm(O - truth) / torch.norm(truth)).item())
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for (name, values), (colour, style) in zip(errors.items(), ((GREY, "o-"), (BLUE, "s--"), (RED, "o-")), strict=True):
        axes.plot(sizes, values, style, ms=4.5, color=colour, lw=1.8, label=name)
    axes.set_ylim(0)
    axes.set_xlabel("size of one entry in a thousand of Q, K and V; the others are of size 1")
    axes.set_ylabel("relative error of O")
    axes.set_title(f"{heads} heads, N = {N}, d = {d}: run on a CPU, operands rounded to e4m3")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "learn-passes": passes,
    "learn-online": online,
    "learn-traffic": traffic,
    "learn-loops": loops,
    "learn-occupancy": occupancy,
    "learn-warps": warps,
    "learn-order": order,
    "learn-fp8": low_precision,
    "learn-steps": steps,
}
