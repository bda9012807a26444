"""benchmarks/versions.py: versions of the package, each in a separate process, timed in turns."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
TINY = ("--suite", "cpu", "--match", "fp32", "--match", "full", "--match", "N512", "--device", "cpu", "--rounds", "2")


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "versions.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ENVIRONMENT)


def test_versions_are_timed_and_compared_with_the_first():
    done = run(str(ROOT), ".", *TINY)
    assert done.returncode == 0, done.stderr
    times = [float(number) for number in re.findall(r"(\d+\.\d{4})\s", done.stdout)]
    speeds = [float(number) for number in re.findall(r"(\d+\.\d{3})(?!\d)", done.stdout)]
    assert len(times) == 4, done.stdout  # two passes of two versions
    assert all(time > 0.0 for time in times)
    assert speeds.count(1.0) >= 2, done.stdout  # the first, over itself
    assert "not timed" not in done.stderr


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("def attention(*given, **options): raise RuntimeError('broken on purpose')", "broken on purpose"),
        ("raise SystemExit", "its process has ended"),
    ],
)
def test_a_version_that_fails_is_told_and_the_others_go_on(tmp_path, line, why):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    with (tmp_path / "src" / "tilewise" / "__init__.py").open("a") as file:
        file.write(f"\n{line}\n")
    done = run(".", str(tmp_path), *TINY)
    assert done.returncode == 0, done.stderr
    assert "not timed" in done.stderr
    assert why in " ".join(done.stderr.split())
    assert re.search(r"\d+\.\d{4}\s+1\.000\s+-\s+-", done.stdout), done.stdout


def test_what_is_no_version_is_told():
    done = run("no-such-revision", *TINY)
    assert done.returncode == 2
    assert "neither a folder" in done.stderr
