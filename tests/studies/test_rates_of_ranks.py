"""studies/bench/parallel.py: which bars hold, which ranks hold more than the model says, and a rehearsal on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from studies.bench import parallel

ROW = {
    "plan": "ring", "mask": "causal", "sharding": "Zigzag", "tokens": 1 << 16, "heads": (32, 8), "gpus": 8,
    "efficiency": 0.91, "peak_bytes": 30, "peak_bytes_of_share": 10, "bytes_of_model": 20, "by_default": True,
}  # fmt: skip
REHEARSAL = """
import sys
from studies.bench import parallel
from tests.parallel import forked
sys.exit(forked.torchrun(2, parallel.main))
"""


def words(rows):
    return [line.split()[0] for line in parallel.verdicts(rows)]


def test_bars_are_held_or_missed_by_the_best_plan_and_by_those_that_have_their_own():
    assert words([ROW]) == ["held"] * 3
    best, own, default = parallel.verdicts([ROW | {"efficiency": 0.81}])
    assert best == "missed  causal 65536 (32, 8) on 8: ring has 0.810 of ideal, the bar is 0.9"
    assert own == "missed  causal 65536 (32, 8) on 8: ring has 0.810 of ideal, the bar is 0.82"
    assert default.startswith("held")
    assert words([ROW | {"gpus": 4}]) == ["missed", "held"]
    assert words([ROW | {"gpus": 4, "mask": "window", "tokens": 1 << 19, "efficiency": 0.92}]) == ["held"] * 2
    assert words([ROW | {"gpus": 2}]) == ["held"]
    assert words([ROW | {"gpus": 1, "efficiency": 0.0}]) == []


def test_ranks_that_hold_too_much_are_named():
    *_, line = parallel.verdicts([ROW | {"peak_bytes": 40}])
    assert line.startswith("missed  ring holds 30 bytes besides, the model says 20")


def test_the_best_plan_counts_where_documents_are_packed():
    packed = [
        ROW | {"mask": "documents", "plan": plan, "efficiency": e} for plan, e in (("ulysses", 0.9), ("ring", 0.5))
    ]
    assert words(packed)[0] == "held"
    assert "documents 65536" in parallel.verdicts(packed[1:])[0]


def test_no_plan_is_to_be_faster_than_the_default_by_more_than_3_percent():
    for share, word in ((0.98, "held"), (0.9, "missed")):
        rows = [ROW | {"plan": "halo", "by_default": False}, ROW | {"efficiency": share * ROW["efficiency"]}]
        *_, line = parallel.verdicts(rows)
        assert line.split()[0] == word
        assert f"plan=None has ring, {share:.3f} of the best, halo" in line
    assert not [line for line in parallel.verdicts([ROW | {"by_default": False}]) if "plan=None" in line]


def test_a_rehearsal_runs_on_a_cpu():
    command = [sys.executable, "-W", "ignore", "-c", REHEARSAL, "--quick", "--mask", "window"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["plan"] for row in rows] == 2 * list(parallel.NAMES)
    assert {row["gpus"] for row in rows} == {2}
    assert [line for line in done.stdout.splitlines() if "plan=None has" in line]
