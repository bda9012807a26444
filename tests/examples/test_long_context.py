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
SCRIPT = ROOT / "examples" / "long_context.py"
OPTIONS = ("--length", "256", "--steps", "4")
FORKED = """
import runpy, sys
from tests.parallel import forked
main = runpy.run_path(sys.argv.pop(1))["main"]
sys.exit(any([forked.torchrun(ranks, main) for ranks in (1, 4)]))
"""
"""One process, and then four, which import PyTorch once together."""


def losses(plan, *command):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *command, str(SCRIPT), *OPTIONS, "--plan", plan]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", done.stdout)]


def test_losses_are_those_of_one_process():
    found = losses("ring", "-c", FORKED)
    one, four = found[:4], found[4:]
    two = losses("ulysses", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for several in (four, two):
        assert several == pytest.approx(one, abs=2e-5)
    assert len(one) == 4
    assert one[-1] < one[0]
