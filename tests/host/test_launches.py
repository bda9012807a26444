"""Grid and arguments of launches, as recorded: what the host decides is seen where it changes."""

import hashlib
import json
from pathlib import Path

import pytest
from scripts import lines

pytest.importorskip("triton")
RECORDED = json.loads(Path(__file__).with_name("launches.json").read_text())


def test_launches_are_as_recorded():
    (found,) = lines("host/launches.py", "-")
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
    names = "forward", *(f"backward_{name}" for name in ("dkdv", "dq", "delta", "gather")), "list_tiles"
    assert {("triton", f"attention_{name}") for name in names} <= kernels
