"""What a run of the tests prints: each failure when it happens, the slowest tests at the end."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = """
import os, time
import pytest

def test_right():
    assert True

def test_wrong():
    time.sleep(0.01)
    assert False, "this is wrong"

@pytest.fixture
def broken():
    raise ValueError

def test_without_what_it_needs(broken):
    assert True
"""
KILLED = """
def test_last():
    os.kill(os.getpid(), 9)
"""


def run(folder, text, *options):
    """The status and output of pytest on one file, beside a copy of the tests' conftest.py."""
    shutil.copy(HERE / "conftest.py", folder)
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_a_run_that_is_killed_has_named_its_failures(tmp_path):
    code, lines = run(tmp_path, TESTS + KILLED, "-n", "0")
    assert code == -signal.SIGKILL
    assert [line.split(",")[0] for line in lines if line.startswith("FAILED")] == [
        "FAILED test_it.py::test_wrong (call", "FAILED test_it.py::test_without_what_it_needs (setup"
    ]  # fmt: skip


def test_so_has_a_run_in_workers_and_it_lists_the_slowest(tmp_path):
    code, lines = run(tmp_path, TESTS, "-n", "1")
    assert code == 1
    end = next(n for n, line in enumerate(lines) if line.startswith("===="))
    assert sum(line.startswith("FAILED") for line in lines[:end]) == 2
    assert any("slowest 10 durations" in line for line in lines[end:])
