"""Grid and arguments of launches, as recorded: what the host decides is seen where it changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "launches.json").read_text())


def test_launches_are_as_recorded():
    command = [sys.executable, str(HERE / "launches.py"), "-"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    names = {*found, *RECORDED}
    differ = sorted(name for name in names if json.dumps(found.get(name)) != json.dumps(RECORDED.get(name)))
    assert not differ, (
        f"{len(differ)} launches are not as recorded, first {differ[0]}: {found.get(differ[0])}, which was "
        f"{RECORDED.get(differ[0])}. If this is meant, record them: TRITON_INTERPRET=0 python tests/host/launches.py"
    )


def test_every_kernel_is_recorded():
    kernels = {(name.split()[0], name.split(": ")[1].split()[0]) for name in RECORDED}
    names = "forward", "backward", "backward_preprocess", "backward_postprocess", "forward_fp32", "backward_fp32"
    assert {("hopper", f"attention_{name}") for name in names} <= kernels
    names = "forward", *(f"backward_{name}" for name in ("dkdv", "dq", "delta", "dbias")), "list_tiles"
    assert {("triton", f"attention_{name}") for name in names} <= kernels
