"""What ran where: python tests/conformance/table.py [FILE ...], rows = cases, columns = back ends.

FILE is what a run of the conformance tests wrote: .pytest_cache/d/conformance/report.json, or --conformance-report's.
Several files, say of a machine with and one without a GPU, are put side by side.
"""

import json
import sys
from collections import Counter
from pathlib import Path

DEFAULT = Path(".pytest_cache/d/conformance/report.json")
MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}

Cells = dict[tuple[str, str], dict[str, str]]


def read(paths: list[Path]) -> Cells:
    """Every (case, back end) with its outcome and reason."""
    return {(row["case"], row["backend"]): row for path in paths for row in json.loads(path.read_text())}


def lay_out(cells: Cells) -> tuple[list[str], list[list[str]], list[str]]:
    """Column heads, rows, and the reasons that cells refer to by number."""
    cases, backends = (sorted({key[index] for key in cells}) for index in (0, 1))
    reasons = sorted({cell["reason"] for cell in cells.values() if cell["reason"]})
    rows = []
    for case in cases:
        row = [case]
        for backend in backends:
            cell = cells.get((case, backend))
            note = f" {reasons.index(cell['reason']) + 1}" if cell and cell["reason"] else ""
            row.append(MARKS[cell["outcome"]] + note if cell else "not run")
        rows.append(row)
    for mark in MARKS:
        counts = Counter(backend for (_, backend), cell in cells.items() if cell["outcome"] == mark)
        rows.append([f"total {mark}", *(str(counts[backend]) for backend in backends)])
    return ["case", *backends], rows, reasons


def draw(head: list[str], rows: list[list[str]]) -> None:
    """Prints the table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        for row in [head, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*(f"[red]{cell}[/red]" if cell.startswith("FAILED") else cell for cell in row))
    Console().print(table)


def main(arguments: list[str]) -> int:
    """Draws the files' table; 1 if one is missing."""
    paths = [Path(argument) for argument in arguments] or [DEFAULT]
    for path in paths:
        if not path.is_file():
            print(f"{path} is not there; run the tests in tests/conformance first", file=sys.stderr)
            return 1
    head, rows, reasons = lay_out(read(paths))
    draw(head, rows)
    for number, reason in enumerate(reasons, 1):
        print(f"{number}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
