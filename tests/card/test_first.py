"""A process's first step on a GPU: another length compiles nothing, and a full cache is found by later processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "host" / "first.py"

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def step(cache, *lengths):
    """What first.py prints of a step of each length, in a process of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), "step", *lengths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_another_length_compiles_nothing_nor_does_another_process(tmp_path):
    begun, again = (step(tmp_path, "2048", "777", "4096") for _ in range(2))
    compiled = [name for line in begun if line.get("length") == 2048 for name in line["compiled"]]
    assert len(compiled) == len(set(compiled)) == 4, "each once: the gradient's beside the forward's"
    for line in begun:
        if line.get("length") in (777, 4096):
            assert line["compiled"] == line["found"] == []
            assert line["seconds"] < 0.1, line
    found = [line for line in again if "length" in line]
    assert not any(line["compiled"] for line in found)
    assert sum(len(line["found"]) for line in found) == 4
    assert not again[-1]["hashed"]
