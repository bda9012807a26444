"""python benchmarks/report.py: docs/performance.md and its pictures, anew from benchmarks/results."""

import sys
from pathlib import Path

from tilewise.bench.report import write

if __name__ == "__main__":
    here = Path(__file__).parent
    try:
        print(write(here / "results", here.parent / "docs"))
    except ValueError as error:
        sys.exit(str(error))
