"""One sequence over processes on gloo: each spawn runs its cases of ranks.py, and the test names those that fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from . import agreement, contents, functions, ranks

assert agreement  # these add their cases to those of ranks
assert contents
assert functions

ROOT = Path(__file__).parents[2]
SECONDS = 1200
"""After which all ranks are ended, on a busy machine."""


@pytest.mark.parametrize("spawn", ranks.SPAWNS)
def test_on_ranks(spawn, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.parallel.ranks", spawn, str(tmp_path)]
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        errors = started.communicate(timeout=SECONDS)[1]
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    files = [tmp_path / f"{rank}.json" for rank in range(ranks.SPAWNS[spawn])]
    assert all(file.exists() for file in files), errors
    found = [json.loads(file.read_text()) for file in files]
    wrong = [
        f"{name}, rank {rank}: {text}"
        for name in ranks.CASES[spawn]
        for rank, of in enumerate(found)
        if (text := of.get(name, "it did not run"))
    ]
    assert not wrong, "\n".join(wrong)
