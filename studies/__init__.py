"""Studies: questions about tilewise, and what writes its documents. Run python -m studies NAME, from a checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return this process's variables and `more`, for a process that imports the studies from any folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}
