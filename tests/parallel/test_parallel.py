"""One sequence over four processes on gloo: one spawn runs every case of ranks.py, and each is a test here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from . import ranks

ROOT = Path(__file__).parents[2]
SECONDS = 240
"""After which all ranks are ended, on a busy machine."""


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What every rank wrote about every case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.parallel.ranks"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks.RANKS)
    ]
    try:
        errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(ranks.RANKS)]
    assert all(file.exists() for file in files), errors
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", ranks.CASES)
def test_on_four_ranks(name, results):
    wrong = {rank: found.get(name, {"wrong": "it did not run"})["wrong"] for rank, found in enumerate(results)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)
    assert torch.isfinite(torch.tensor([found[name]["seconds"] for found in results])).all()
