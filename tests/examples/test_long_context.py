"""examples/long_context.py: processes that hold a part of each sequence have the losses of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def losses(processes, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*run, str(processes), str(ROOT / "examples" / "long_context.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", done.stdout)]


def test_losses_are_those_of_one_process():
    one = losses(1, "--length", "256", "--steps", "4")
    for plan, processes in (("ring", 4), ("ulysses", 2)):
        several = losses(processes, "--length", "256", "--steps", "4", "--plan", plan)
        assert len(several) == len(one) == 4
        assert several == pytest.approx(one, abs=2e-5)
    assert one[-1] < one[0]
