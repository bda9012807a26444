"""Beside ring-flash-attn's zigzag and yunchang's Ulysses, which call our flash_attn: errors and bytes are no larger."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("client", "ranks"), [("ring_flash_attn", 4), ("yunchang", 2)])
def test_errors_and_bytes_beside_a_peer(client, ranks, tmp_path):
    if absent := [name for name in (client, "transformers") if find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)}: not installed")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("run_peers.py")), client]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "meet")], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    lines = [process.communicate(timeout=900)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    rows = [{row["name"]: row for row in map(json.loads, (x for x in own if x.startswith("{")))} for own in lines]
    for own in rows:
        for mine, theirs in zip(own["ours"]["errors"], own["peer"]["errors"], strict=True):
            assert mine <= 1.001 * theirs, own
    assert all(0 < own["ours"]["bytes"] for own in rows)
    total = {name: sum(own[name]["bytes"] for own in rows) for name in ("ours", "peer")}
    print(client, total, rows[0])
    assert total["ours"] <= total["peer"]
