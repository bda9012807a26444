"""tools/versions.py: versions of the package, each in a separate process, timed in turns."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
TINY = ("--suite", "cpu", "--match", "fp32", "--match", "full", "--match", "N512", "--device", "cpu", "--rounds", "2")


def run(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "versions.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ENVIRONMENT)


def copied(folder, line):
    """A version whose package ends with a line."""
    shutil.copytree(ROOT / "src", folder / "src")
    with (folder / "src" / "tilewise" / "__init__.py").open("a") as file:
        file.write(f"\n{line}\n")
    return str(folder)


def test_versions_are_timed_and_compared_with_the_first():
    done = run(str(ROOT), ".", *TINY)
    assert done.returncode == 0, done.stderr
    times = [float(number) for number in re.findall(r"(\d+\.\d{4})\s", done.stdout)]
    speeds = [float(number) for number in re.findall(r"(\d+\.\d{3})(?!\d)", done.stdout)]
    assert len(times) == 4, done.stdout  # two passes of two versions
    assert all(time > 0.0 for time in times)
    assert speeds.count(1.0) >= 2, done.stdout  # the first, over itself
    assert "not timed" not in done.stderr


def test_versions_that_fail_are_told_and_the_others_go_on(tmp_path):
    fails = copied(tmp_path / "fails", "def attention(*given, **options): raise RuntimeError('broken on purpose')")
    done = run(".", fails, copied(tmp_path / "ends", "raise SystemExit"), *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not timed") >= 2, done.stderr
    for why in ("broken on purpose", "its process has ended"):
        assert why in " ".join(done.stderr.split())
    assert re.search(r"\d+\.\d{4}\s+1\.000\s+-\s+-", done.stdout), done.stdout


def test_what_is_no_version_is_told():
    done = run("no-such-revision", *TINY)
    assert done.returncode == 2
    assert "neither a folder" in done.stderr
