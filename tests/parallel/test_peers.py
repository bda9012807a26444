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
    command += [str(ranks), str(tmp_path / "meet")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=900)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [{line["name"]: line for line in pair} for pair in zip(lines[::2], lines[1::2], strict=True)]
    assert len(rows) == ranks
    for own in rows:
        for mine, theirs in zip(own["ours"]["errors"], own["peer"]["errors"], strict=True):
            assert mine <= 1.001 * theirs, own
    assert all(0 < own["ours"]["bytes"] for own in rows)
    total = {name: sum(own[name]["bytes"] for own in rows) for name in ("ours", "peer")}
    print(client, total, rows[0])
    assert total["ours"] <= total["peer"]
