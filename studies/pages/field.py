"""Compare tilewise with the best of cuDNN, FlashAttention-2, -3 and -4, on the grid of the suite `paper`.

PyTorch brings the first two of the four. All were measured in one separate run: a device's peers.json holds the
rates of each cell. So tilewise over cuDNN in any run, divided by the best one's ratio to cuDNN in theirs, is tilewise
over the best of them, as far as ratios carry over from day to day.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench.results import OK, Row, repeated, rows_of
from ..bench.suites import BACKWARD, FORWARD
from ..bench.tables import length_label, markdown

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OURS, THEIRS = "tilewise", "sdpa cudnn"
Line = tuple[int, bool, str]
"""Head size, causal or not, pass."""
FIELD = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
"""Names in such a file, and as shown."""
SUFFIXES = {FORWARD: "", BACKWARD: "_bwd"}


def peers_of(file: Path) -> dict[str, Any] | None:
    """Return the run of these peers on the device of a results file; None if there is none."""
    path = file.with_name("peers.json")
    return json.loads(path.read_text()) if path.exists() else None


def best_of(peers: dict[str, Any]) -> dict[Line, tuple[float, ...]]:
    """Return by length the fastest peer over cuDNN in the same run."""
    found: dict[Line, dict[int, float]] = {}
    for row in peers["rows"]:
        for pass_, suffix in SUFFIXES.items():
            rates = [row[name + suffix] for name in FIELD if name + suffix in row]
            found.setdefault((row["D"], row["causal"], pass_), {})[row["N"]] = max(rates) / row[f"cudnn{suffix}"]
    return {line: tuple(cells[length] for length in LENGTHS) for line, cells in found.items()}


def absent(peers: dict[str, Any]) -> list[str]:
    """Say who has no times where, in sentences."""
    lines = []
    for name, title in FIELD.items():
        for pass_, suffix in SUFFIXES.items():
            rows = [row for row in peers["rows"] if name + suffix not in row]
            where = dict.fromkeys((row["D"], row["causal"]) for row in rows)
            kinds = [f"{size} {'causal' if causal else 'full'}" for size, causal in where]
            lines += [f"{title} has no {pass_} in {len(rows)} rows: head size {', '.join(kinds)}."] if rows else []
    return lines


def ratios(runs: Sequence[Sequence[Row]], best: dict[Line, tuple[float, ...]]) -> dict[Line, list[float]]:
    """Return tilewise over the best peer by length: the median of the runs that measured the cell, nan if none did."""
    speeds: dict[tuple[Line, int], list[float]] = {}
    for rows in runs:
        times = {(row.of, row.pass_, row.implementation): row.milliseconds for row in rows if row.status == OK}
        for (case, pass_, name), ours in times.items():
            theirs = times.get((case, pass_, THEIRS))
            line = case.head_size, case.causal, pass_
            if name == OURS and ours and theirs and line in best and case.length in LENGTHS:
                speeds.setdefault((line, case.length), []).append(theirs / ours)
    return {
        line: [
            statistics.median(speeds.get((line, length), [math.nan])) / theirs
            for length, theirs in zip(LENGTHS, over_cudnn, strict=True)
        ]
        for line, over_cudnn in best.items()
    }


def beside_blocks(rows: Sequence[Row], head_size: int, pass_: str) -> tuple[float, float]:
    """Fit what 128 rows cost besides their blocks of 128 x 128 scores, in blocks; return it and the largest error.

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
    """Return a table of the ratios with its means; nothing where the grid was never repeated, or the peers not
    measured."""
    same, peers = repeated(file, content, "paper"), peers_of(file)
    if not same or not peers:
        return []
    best = best_of(peers)
    runs, of = [rows_of(each, "paper") for each in same], same[-1]["suites"]["paper"]["environment"]
    found = ratios(runs, best)
    versions = ", ".join(f"{name} {version}" for name, version in peers["versions"].items())
    lines = [
        "### paper, against FlashAttention-3 and FlashAttention-4\n",
        f"Speed of tilewise over the fastest of {', '.join(FIELD.values())}. tilewise and the others were measured in",
        "different runs, on cards of the same kind, each with cuDNN. So this is the ratio of two ratios to cuDNN;",
        f"tilewise's is the median of {len(runs)} runs.",
        f"[Rates of the others](../../benchmarks/results/{file.parent.name}/peers.json):",
        f"{peers['when']}, {versions}. tilewise: commit {of['commit']}, kernels {of['kernels']}.\n",
        *(f"- {line}" for line in absent(peers)),
        f"- Why: {peers['missing']}.",
        "",
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
        "Short sequences pay for fixed work: first loads, a pipeline that fills and drains, last stores, and in the",
        "backward the kernels that read and write every row. The table compares this work of 128 rows with one block",
        "of 128 x 128 scores. It fits milliseconds = a blocks + b rows / 128 to every length, with and without mask.",
        "With a causal mask, 128 rows have 2.5 blocks on average at 512 tokens, and 64.5 at 16k.\n",
        "| head size | pass | 128 rows cost as much as | fit off by at most |",
        "|---|---|---:|---:|",
    ]
    for size, pass_ in dict.fromkeys((size, pass_) for size, _, pass_ in best):
        cost, off = beside_blocks(runs[0], size, pass_)
        lines.append(f"| {size} | {pass_} | {cost:.1f} blocks | {off:.0%} |")
    return [*lines, ""]
