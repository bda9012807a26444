"""tilewise over the best of cuDNN, FlashAttention-3 and FlashAttention-4, on the grid of the suite `paper`.

Of the three PyTorch brings cuDNN alone. The others were measured beside it once, on one H200 (PyTorch 2.11, bf16, whole
backward): `BEST` holds, for each cell, the fastest of the three over cuDNN in that run. So tilewise over cuDNN in any
run, divided by it, is tilewise over the best of them, as far as ratios carry over from day to day.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .results import OK, Row, repeated, rows_of
from .suites import BACKWARD, FORWARD
from .tables import length_label, markdown

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OURS, THEIRS = "tilewise", "sdpa cudnn"
Line = tuple[int, bool, str]
"""Head size, causal or not, pass."""
BEST: dict[Line, tuple[float, ...]] = {
    (64, False, FORWARD): (1.00, 1.00, 1.06, 1.08, 1.15, 1.15),
    (64, False, BACKWARD): (1.19, 1.13, 1.15, 1.15, 1.17, 1.16),
    (64, True, FORWARD): (1.00, 1.00, 1.02, 1.07, 1.12, 1.11),
    (64, True, BACKWARD): (1.28, 1.25, 1.22, 1.21, 1.25, 1.24),
    (128, False, FORWARD): (1.00, 1.00, 1.00, 1.09, 1.10, 1.14),
    (128, False, BACKWARD): (1.05, 1.17, 1.11, 1.10, 1.15, 1.16),
    (128, True, FORWARD): (1.00, 1.09, 1.14, 1.16, 1.23, 1.18),
    (128, True, BACKWARD): (1.15, 1.11, 1.09, 1.14, 1.04, 1.16),
    (256, False, FORWARD): (1.00, 1.02, 1.00, 1.06, 1.09, 1.09),
    (256, False, BACKWARD): (1.06, 1.01, 1.00, 1.00, 1.05, 1.06),
    (256, True, FORWARD): (1.00, 1.02, 1.04, 1.24, 1.09, 1.17),
    (256, True, BACKWARD): (1.00, 1.00, 1.00, 1.00, 1.00, 1.00),
}
"""By length, the fastest of the three over cuDNN."""


def ratios(runs: Sequence[Sequence[Row]]) -> dict[Line, list[float]]:
    """tilewise over the best of the three by length: the median of the runs that measured the cell, nan if none did."""
    speeds: dict[tuple[Line, int], list[float]] = {}
    for rows in runs:
        times = {(row.of, row.pass_, row.implementation): row.milliseconds for row in rows if row.status == OK}
        for (case, pass_, name), ours in times.items():
            theirs = times.get((case, pass_, THEIRS))
            line = case.head_size, case.causal, pass_
            if name == OURS and ours and theirs and line in BEST and case.length in LENGTHS:
                speeds.setdefault((line, case.length), []).append(theirs / ours)
    return {
        line: [
            statistics.median(speeds.get((line, length), [math.nan])) / best
            for length, best in zip(LENGTHS, over_cudnn, strict=True)
        ]
        for line, over_cudnn in BEST.items()
    }


def beside_blocks(rows: Sequence[Row], head_size: int, pass_: str) -> tuple[float, float]:
    """What 128 rows cost beside their blocks of 128 x 128 scores, in blocks; and how far the fit is off at most.

    Least squares over a grid, by relative error: milliseconds = a blocks + b rows / 128; gives b / a. Rows are those of
    tiles that stay: queries forward, keys backward. A causal mask leaves n (n + 1) / 2 blocks of n^2.
    """
    counted, times = [], []
    for row in rows:
        case = row.of
        if (row.implementation, row.status, case.head_size, row.pass_) == (OURS, OK, head_size, pass_):
            n, heads = case.length // 128, case.batch * case.heads
            counted.append([heads * (n * (n + 1) / 2 if case.causal else n * n), heads * n])
            times.append(row.milliseconds)
    scaled = torch.tensor(counted, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    costs = torch.linalg.lstsq(scaled, torch.ones(len(times), 1, dtype=torch.float64)).solution
    of_block, of_rows = costs[:, 0].tolist()
    return of_rows / of_block, float((scaled @ costs - 1.0).abs().max())


def section(file: Path, content: dict[str, Any]) -> list[str]:
    """A table of the ratios with its means; nothing where the grid was never repeated."""
    same = repeated(file, content, "paper")
    if not same:
        return []
    runs, of = [rows_of(each, "paper") for each in same], same[-1]["suites"]["paper"]["environment"]
    found = ratios(runs)
    lines = [
        "### paper, beside FlashAttention-3 and FlashAttention-4\n",
        f"tilewise over the best of cuDNN, FlashAttention-3 and FlashAttention-4: the median of {len(runs)} runs of",
        "its ratio to cuDNN, divided by the best one's ratio to cuDNN, measured once, beside it, on a card of the same",
        "kind. No results file is kept of that; the ratios are `BEST` in [`field.py`](../src/tilewise/bench/field.py).",
        f"Measured at commit {of['commit']}, kernels {of['kernels']}.\n",
    ]
    table = [
        [str(size), "causal" if causal else "full", pass_, *("" if math.isnan(x) else f"{x:.2f}" for x in cells)]
        for (size, causal, pass_), cells in found.items()
    ]
    lines += [markdown(["head size", "mask", "pass", *map(length_label, LENGTHS)], table), ""]
    for pass_ in (FORWARD, BACKWARD):
        cells = [x for line, of_line in found.items() if line[2] == pass_ for x in of_line if not math.isnan(x)]
        mean = math.exp(statistics.fmean(map(math.log, cells)))
        slower = sum(x < 1.0 for x in cells)
        counts = f"{len(cells)} cells, {min(cells):.2f} at least, under 1 in {slower}"
        lines.append(f"- {pass_}: {mean:.3f} in the geometric mean of {counts}.")
    lines += [
        "",
        "Short sequences lose to what 128 rows cost beside their blocks of 128 x 128 scores: first loads, a pipeline",
        "that fills and drains, last stores, and around the backward the kernels that read and write every row. A fit",
        "of milliseconds = a blocks + b rows / 128 to every length, with and without mask, says how much that is. With",
        "a causal mask, 128 rows of 512 have 2.5 blocks on average, of 16k 64.5.\n",
        "| head size | pass | 128 rows cost as much as | fit off by at most |",
        "|---|---|---:|---:|",
    ]
    for size, pass_ in dict.fromkeys((size, pass_) for size, _, pass_ in BEST):
        cost, off = beside_blocks(runs[0], size, pass_)
        lines.append(f"| {size} | {pass_} | {cost:.1f} blocks | {off:.0%} |")
    return [*lines, ""]
