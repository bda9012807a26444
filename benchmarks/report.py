"""python benchmarks/report.py: writes docs/performance.md and the other measured pages, their pictures, and the numbers
of README.md, from benchmarks/results."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import readme

from studies.pages.report import write

if __name__ == "__main__":
    here = Path(__file__).parent
    try:
        print(write(here / "results", here.parent / "docs"))
        print(*readme.write(), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
