"""The kernels that quantize Q, K and V compile for chips that are not here, with and without rotary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SPILLS = {"oldest": 0, "newest": 8}
"""Bytes that a thread may keep in local memory; the newest Triton does so at head size 64 without rotary, too."""


@pytest.mark.parametrize(
    ("target", "release"), [*((name, "oldest") for name in ("sm_80", "sm_90", "gfx942")), ("sm_90", "newest")]
)
def test_few_kernels_spill_and_rows_are_read_16_bytes_at_a_time(target, release):
    newest = os.environ.get("TILEWISE_TRITON_NEWEST")
    if release == "newest" and not newest:
        pytest.skip("TILEWISE_TRITON_NEWEST is not set")
    path = os.pathsep.join([*([newest] if release == "newest" else []), str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    script = [sys.executable, str(ROOT / "tests/triton/quantize_compiled.py"), target]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 18
    for one in found:
        assert one["spills"] <= SPILLS[release], one
        assert one["registers"] <= 256, one
        assert one["narrow"] == 0 or one["kernel"] != "attention_quantize" or target == "gfx942", one
