"""Questions about tilewise, and what writes its own documents: python -m studies NAME, from a checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's variables and `more`, for one that imports the studies from wherever it runs."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
