"""Other projects, unmodified, on tilewise by `install`, in processes of their own: as attention by other means."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tilewise as tw

CLIENTS = Path(__file__).parent / "clients"
SOURCE = Path(tw.__file__).parents[1]
QUIET = ["-W", "ignore"]  # what the clients warn of


def start(script: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *QUIET, str(CLIENTS / script), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: list[subprocess.Popen]) -> None:
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(told)


def need(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed; tests/constraints.txt has the version that was tested")


@pytest.mark.parametrize("client", ["transformers", "diffusers", "xformers"])
def test_a_client_finds_tilewise_and_is_right(client):
    need(client)
    finish([start(f"run_{client}.py")])


def test_continuous_batching_of_transformers():
    need("transformers")
    finish([start("run_batching.py")])


@pytest.mark.parametrize("client", ["ring_flash_attn", "yunchang"])
def test_a_ring_of_two_processes_is_one_device(client, tmp_path):
    need(client, *["transformers"][: client == "ring_flash_attn"])
    finish([start("run_ring.py", client, str(rank), str(tmp_path / "meet")) for rank in range(2)])
