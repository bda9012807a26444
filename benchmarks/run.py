"""python benchmarks/run.py [--suite paper ...]: `python -m studies bench`, with results kept in benchmarks/results."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from studies.__main__ import main

if __name__ == "__main__":
    if not {"--json", "--results"} & set(sys.argv):
        sys.argv += ["--results", str(Path(__file__).parent / "results")]
    sys.argv.insert(1, "bench")
    sys.exit(main())
