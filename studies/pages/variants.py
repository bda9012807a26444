"""Compare what variants cost in several runs of the suite `variants`."""

import statistics
from pathlib import Path
from typing import Any

from ..bench.costs import Cost, costs
from ..bench.results import repeated, rows_of
from ..bench.tables import markdown

SUITE = "variants"
TEXT = """\
Speed is the plain call's time over the variant's, in the same rounds; of packed sequences per visited tile. An aim is
what the project asks of a variant (`AIMS` in [`costs.py`](../../studies/bench/costs.py)).
"""


def section(file: Path, content: dict[str, Any]) -> list[str]:
    """Return a table of every variant's speed: the median, the least and the most; nothing where the suite was run
    once."""
    runs = repeated(file, content, SUITE)
    if len(runs) < 2:
        return []
    of = runs[-1]["suites"][SUITE]["environment"]
    found: dict[tuple[str, str, str], list[Cost]] = {}
    for run in runs:
        for cost in costs(rows_of(run, SUITE)):
            found.setdefault((str(cost.row.of), cost.row.pass_, cost.row.implementation), []).append(cost)
    lines, met = [], []
    for where, each in found.items():
        speeds, aim = [cost.aimed for cost in each], each[0].aim
        middle = statistics.median(speeds)
        numbers = (f"{speed:.3f}" for speed in (middle, min(speeds), max(speeds)))
        lines.append([*where, *numbers, f"{aim:.2f}" if aim else ""])
        met += [middle >= aim] if aim else []
    return [
        f"### {SUITE}, in {len(runs)} runs\n",
        f"Measured at commit {of['commit']}, kernels {of['kernels']}.\n",
        f"- {sum(met)} of {len(met)} aims are met in the median.\n",
        TEXT,
        markdown(["case", "pass", "variant", "median", "least", "most", "aim"], lines) + "\n",
    ]
