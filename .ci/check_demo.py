"""Check what `make demo` leaves: its page and summary.json must hold both trainings and the benchmark.

python .ci/check_demo.py out
"""

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ATTENTIONS = ("standard", "tilewise")
PICTURE = "<img alt='"


def main(folder: Path) -> int:
    """Print what is wrong, and return the exit status."""
    try:
        page, summary = (folder / "index.html").read_text(), json.loads((folder / "summary.json").read_text())
        found = [*of_trainings(page, summary), *of_benchmark(page, summary["benchmark"])]
    except (OSError, ValueError, KeyError) as error:
        found = [f"{type(error).__name__}: {error}"]
    for line in found:
        print(f"{folder}: {line}", file=sys.stderr)
    return bool(found)


def of_trainings(page: str, summary: dict[str, Any]) -> Iterator[str]:
    """Find what is wrong with the two trainings."""
    for name in ATTENTIONS:
        losses, steps = summary[f"losses_{name}"], summary["settings"]["steps"]
        if len(losses) != steps or not all(map(is_number, losses)):
            yield f"the training with {name} attention must have a loss for each of {steps} steps, got {losses}"
        elif not losses[-1] < losses[0]:
            yield f"the losses with {name} attention must fall, got {losses[0]} first and {losses[-1]} last"
        elif f"<td>{losses[-1]:.4f}</td>" not in page:
            yield f"the page must show the last loss with {name} attention, {losses[-1]:.4f}"
        if not (is_number(summary["time_s"][name]) and summary["time_s"][name] > 0):
            yield f"the training with {name} attention must have a time, got {summary['time_s'][name]}"
    if summary["losses_equal"] is not True:
        yield "the losses of both trainings must be equal but for rounding"


def of_benchmark(page: str, benchmark: dict[str, Any]) -> Iterator[str]:
    """Find what is wrong with the benchmark."""
    for name in ATTENTIONS:
        rows = [row for row in benchmark["rows"] if row["implementation"] == name]
        if not any(is_number(row["milliseconds"]) and row["milliseconds"] > 0 for row in rows):
            yield f"the benchmark must have a time of {name}, got {[row['status'] for row in rows]}"
    for line in benchmark["headlines"]:
        if escape(line) not in page:
            yield f"the page must show {line!r}"
    if not benchmark["headlines"]:
        yield "the benchmark must have a sentence, got none"
    if page.count(PICTURE) < 2:
        yield f"the page must show the trainings and the benchmark in pictures, got {page.count(PICTURE)}"


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
