"""Run a script of the tests in a process of its own, where Triton compiles, and read what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from known import ANEW

ROOT = Path(__file__).parents[1]
NEWEST = "TILEWISE_TRITON_NEWEST"
"""The variable that says where the newest Triton lies (`pip install --target`)."""
RELEASES = ("oldest", "newest")
"""The installed Triton, and that one."""


def folder_of(release: str) -> str | None:
    """Return where a release lies, or None for the installed one; skip the test if it is not there."""
    if release == "oldest":
        return None
    if not os.environ.get(NEWEST):
        pytest.skip(f"{NEWEST} does not say where the newest Triton lies")
    return os.environ[NEWEST]


def lines(script: str, *arguments: str, folder: str | None = None, **variables: str) -> list[Any]:
    """Return the JSON that a script prints, line by line, with the Triton of a folder, or with the installed one."""
    path = os.pathsep.join(filter(None, [folder, str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", **variables}
    command = [sys.executable, str(ROOT / "tests" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def alike(script: str, *arguments: str, folder: str | None = None) -> tuple[list[Any], list[Any]]:
    """Return what a script that compiles prints, and what can be compared row by row: the same, but all compiled anew
    where some are known (known.py) and some are not."""
    found = lines(script, *arguments, folder=folder)
    if len({"known" in row for row in found}) == 1:
        return found, found
    return found, lines(script, *arguments, folder=folder, **{ANEW: "1"})
