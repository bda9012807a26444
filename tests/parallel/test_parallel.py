"""One sequence over processes on gloo: each spawn runs its cases of ranks.py, and each case is a test here."""

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from . import agreement, contents, ranks

assert agreement  # these add their cases to those of ranks
assert contents

ROOT = Path(__file__).parents[2]
SECONDS = 1200
"""After which all ranks are ended, on a busy machine."""


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return what every rank of a spawn wrote about every case; each spawn runs once."""

    @cache
    def run(spawn):
        folder = tmp_path_factory.mktemp(spawn)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.parallel.ranks", spawn, str(folder)]
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            errors = started.communicate(timeout=SECONDS)[1]
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
        files = [folder / f"{rank}.json" for rank in range(ranks.SPAWNS[spawn])]
        assert all(file.exists() for file in files), errors
        return [json.loads(file.read_text()) for file in files]

    return run


@pytest.mark.parametrize(("spawn", "name"), [(spawn, name) for spawn, cases in ranks.CASES.items() for name in cases])
def test_on_ranks(spawn, name, results):
    found = results(spawn)
    wrong = {rank: of.get(name, {"wrong": "it did not run"})["wrong"] for rank, of in enumerate(found)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)
    assert torch.isfinite(torch.tensor([of[name]["seconds"] for of in found])).all()
