"""The kernels that quantize Q, K and V compile for chips that are not here, with rotary about as well as without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
MORE = 128
"""Bytes that a thread may keep in local memory for rotary."""


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "release"), [*((name, "oldest") for name in ("sm_80", "sm_90", "gfx942")), ("sm_90", "newest")]
)
def test_rotary_spills_little_and_reads_16_bytes_at_a_time(target, release):
    newest = os.environ.get("TILEWISE_TRITON_NEWEST")
    if release == "newest" and not newest:
        pytest.skip("TILEWISE_TRITON_NEWEST is not set")
    path = os.pathsep.join([*([newest] if release == "newest" else []), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    script = [sys.executable, str(ROOT / "tests/triton/quantize_compiled.py"), target, "128"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 6
    plain = {one["kernel"]: one for one in found if one["pairs"] is None}
    for one in found:
        without = plain[one["kernel"]]
        assert one["spills"] <= without["spills"] + MORE, (one, without)
        if one["kernel"] == "attention_quantize" and target != "gfx942":
            assert one["narrow"] <= without["narrow"], (one, without)
