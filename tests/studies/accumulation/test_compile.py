"""Tier 3 for the experiment: matrix instructions really sum in what was asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


RELEASES = {"oldest": None, "newest": "TILEWISE_TRITON_NEWEST"}
"""The installed Triton, and the variable that says where the newest lies."""


pytestmark = pytest.mark.compile


@pytest.fixture(scope="module", params=["sm_80 oldest", "sm_90 oldest", "sm_90 newest"])
def compiled(request):
    """What became of every combination."""
    target, release = request.param.split()
    variable = RELEASES[release]
    if variable and not os.environ.get(variable):
        pytest.skip(f"{variable} does not say where the newest Triton lies")
    folder = [os.environ[variable]] if variable else []
    path = [*folder, str(HERE.parents[2] / "src"), str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(HERE / "offline.py"), target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    return rows


def test_products_are_summed_in_what_was_asked_for(compiled):
    for row in compiled:
        wanted = {row["of"]["scores"], row["of"]["values"]}
        assert row["sums"] == sorted(name.replace("fp", "f") for name in wanted), row
        assert row["matrix"] in (["HMMA"], ["HGMMA"]), row


def test_exponentials_are_packed_where_asked_for(compiled):
    assert [row["packed"] for row in compiled] == [row["of"]["exp2"] == "halves" for row in compiled]
    assert any(row["packed"] for row in compiled)


def test_loops_do_not_spill_and_resources_are_read(compiled):
    for row in compiled:
        assert row["loops"] == 2, row
        assert row["spills"] == 0, row
        assert row["resources"] == [row["registers"], 0], row


def test_fp16_sums_take_fewer_registers(compiled):
    registers = {(row["of"]["scores"], row["of"]["values"]): row["registers"] for row in compiled}
    assert registers["fp16", "fp16"] < registers["fp32", "fp32"]
