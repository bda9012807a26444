"""Grid and arguments of launches, as recorded: what the host decides is seen where it changes."""

import hashlib
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
    made = {name: hashlib.sha256(json.dumps(one).encode()).hexdigest()[:10] for name, one in found.items()}
    differ = sorted(name for name in {*made, *RECORDED} if made.get(name) != RECORDED.get(name))
    assert not differ, (
        f"{len(differ)} launches are not as recorded, first {differ[0]}: {found.get(differ[0])}. To compare, write "
        "them here and at the commit before: TRITON_INTERPRET=0 python tests/host/launches.py FILE. If this is meant, "
        "record them without FILE"
    )


def test_every_kernel_is_recorded():
    kernels = {(name.split()[0], name.split(": ")[1].split()[0]) for name in RECORDED}
    names = "forward", "backward", "backward_preprocess", "backward_postprocess", "forward_fp32", "backward_fp32"
    assert {("hopper", f"attention_{name}") for name in names} <= kernels
    names = "forward", *(f"backward_{name}" for name in ("dkdv", "dq", "delta", "dbias")), "list_tiles"
    assert {("triton", f"attention_{name}") for name in names} <= kernels
