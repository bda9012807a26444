"""Other projects, unmodified, on tilewise by `install`, in processes of their own: as attention by other means."""

from importlib.util import find_spec
from pathlib import Path

import preloaded
import pytest

CLIENTS = Path(__file__).parent / "clients"


def run(script: str, *arguments: str) -> None:
    program = f"import runpy, warnings\nwarnings.simplefilter('ignore')\nrunpy.run_path({str(CLIENTS / script)!r})"
    done = preloaded.run("-c", program, *arguments, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr


def need(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed; tests/constraints.txt has the version that was tested")


@pytest.mark.parametrize("client", ["transformers", "diffusers", "xformers"])
def test_a_client_finds_tilewise_and_is_right(client):
    need(client)
    run(f"run_{client}.py")


def test_continuous_batching_of_transformers():
    need("transformers")
    run("run_batching.py")


@pytest.mark.parametrize("client", ["ring_flash_attn", "yunchang"])
def test_a_ring_of_two_processes_is_one_device(client, tmp_path):
    need(client, *["transformers"][: client == "ring_flash_attn"])
    run("run_ring.py", client, str(tmp_path / "meet"))
