"""python tools/report.py: writes the pages of docs/results, their pictures, and the numbers of README.md, from
benchmarks/results. A picture that shows the same as before stays as it is."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "docs" / "pictures")]
import palette
import readme
import screens

from studies.bench.results import RESULTS
from studies.pages.report import write

ROOT = Path(__file__).parents[1]


def publish(results: Path, docs: Path) -> None:
    """Writes the pages and the pictures that have changed."""
    with TemporaryDirectory() as folder:
        write(results, Path(folder))
        for page in Path(folder, "results").glob("*.md"):
            (docs / "results" / page.name).write_text(page.read_text())
        for picture in Path(folder, "images").glob("*"):
            if palette.replace(picture, docs / "images" / picture.name):
                print(docs / "images" / picture.name)


if __name__ == "__main__":
    try:
        publish(RESULTS, ROOT / "docs")
        print(*readme.write(), *screens.write(), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
