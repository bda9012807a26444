"""The state of a kernel: what changes it, what does not, and which results turn old."""

import ast
import json
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import states

from studies.bench import results, state
from studies.bench.results import Row
from studies.bench.suites import BACKWARD, FORWARD, SUITES, Case
from studies.pages import report

SM_90 = ("hopper",)
EIGHT_BITS = [f"hopper 8-bit forward {size}" for size in ("D128", "D256", "D64")]
"""Rows that are written in terms of bf16's: all count as changed with any of those."""
ROOT = Path(__file__).parents[2]
DEVICE_FOLDERS = ("src/tilewise", "studies")
PEER = ROOT / "studies" / "bench" / "serving.py"
"""Its kernel only reads, and is what ours is compared with."""
CASE = Case(1, 2, 1024, 64, "bf16", causal=True)


@pytest.fixture
def package(tmp_path):
    """Copy the package, to be changed, and the studies next to it."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "studies", tmp_path / "studies", ignore=ignore)
    return shutil.copytree(state.PACKAGE, tmp_path / "src" / "tilewise", ignore=ignore)


def edit(file, before, after):
    text = file.read_text()
    assert before in text, f"{file} no longer has {before!r}"
    file.write_text(text.replace(before, after))


def changed(package):
    """The kernels that are others than the package's own."""
    ours, theirs = state.states(chips=SM_90), state.states.__wrapped__(package, SM_90)
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def test_names_comments_and_hosts_do_not_enter(package):
    edit(package / "triton/forward.py", "j0 = j * B_C", "start = j * B_C  # a comment")
    edit(package / "triton/forward.py", "j0", "start")
    edit(package / "triton/forward.py", '"""One key tile: ', '"""Another text: ')
    edit(package / "tile/softmax.py", "online_softmax", "softmax_by_tiles")
    files = [*package.rglob("*.py"), *package.parents[1].glob("studies/**/*.py")]
    for file in files:
        file.write_text(file.read_text().replace("online_softmax", "softmax_by_tiles"))
    (package / "tile/blocks.py").rename(package / "tile/slabs.py")
    for file in (file for file in files if file.is_file()):
        file.write_text(re.sub(r"\bblocks import\b", "slabs import", file.read_text()))
    edit(package / "triton/launch.py", "DELTA_ROWS = 64", "DELTA_ROWS = 32")
    assert changed(package) == []


def test_a_revision_from_before_a_move_has_the_same_states(package, monkeypatch):
    (package / "hopper/tiles.py").rename(package / "hopper/rows.py")
    (package / "rotary/kernel.py").rename(package / "tile/turning.py")
    edit(package / "append/kernel.py", "from ..rotary.kernel import", "from ..tile.turning import")
    assert "rotary" in changed(package)
    earlier = {"hopper/tiles.py": "hopper/rows.py", "rotary/kernel.py": "tile/turning.py"}
    monkeypatch.setattr(state, "EARLIER", earlier)
    assert changed(package) == []
    assert all(state.Source(state.PACKAGE).path(file).is_file() for file in state.EARLIER)


def test_a_change_reaches_the_kernels_that_call_it_and_no_others(package):
    edit(package / "hopper/backward/deterministic.py", "def wait_dq_semaphore(", "def wait_dq_semaphore(more, ")
    sizes = ("backward D128", "backward D256", "backward D64", "fp32 backward D128", "fp32 backward D64")
    assert changed(package) == [f"hopper {name}" for name in sizes]


def test_a_mask_has_a_state_of_its_own(package):
    edit(package / "values/intervals.py", "return j <= i", "return j < i + 1")
    assert changed(package) == ["mask causal"]


def test_masks_and_scores_depend_on_what_emits_their_functions(package):
    edit(package / "program/ops.py", "tl.maximum({}, {})", "tl.minimum({}, {})")
    found = state.states(chips=SM_90)
    values = {name for name in found if name.startswith(("mask ", "score "))}
    assert {"mask window", "mask dense", "score softcap", "score alibi"} <= set(changed(package))
    assert set(changed(package)) == values - {"mask spans", "score minus_lse"}


def test_a_row_of_tiles_changes_its_head_size_alone(package):
    edit(package / "hopper/tiles.py", "256: Forward(2, 64, 1, 2,", "256: Forward(2, 64, 1, 3,")
    edit(
        package / "triton/tiles.py",
        '("hopper", 4, 128): Tiles(128, 32, 8, 1)',
        '("hopper", 4, 128): Tiles(128, 32, 8, 2)',
    )
    edit(package / "triton/tiles.py", '("ampere", 2, 64): Tiles(', '("ampere", 2, 64): Tiles(1 * ')
    assert changed(package) == [
        *EIGHT_BITS, "hopper forward D256", "triton fp32 backward D128", "triton fp32 forward D128"
    ]  # fmt: skip


def test_constants_of_a_module_enter(package):
    edit(package / "tile/blocks.py", "INNER = tl.constexpr(16)", "INNER = tl.constexpr(32)")
    assert {"triton forward D64", "triton backward D256"} <= set(changed(package))
    assert not [name for name in changed(package) if name.startswith("hopper forward")]


def test_every_device_function_belongs_to_a_kernel(monkeypatch):
    sources, make = [], state.Source
    monkeypatch.setattr(state, "Source", lambda package: sources.append(make(package)) or sources[-1])
    state.states.__wrapped__(chips=SM_90)
    (source,) = sources
    for folder in DEVICE_FOLDERS:
        for file in sorted({*(ROOT / folder).rglob("*.py")} - {PEER}):
            for name, node in source.module(file).items():
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                    assert (file, name) in source.digests, f"add {folder}/{file.name}:{name} to state.KERNELS"


def test_a_device_without_hopper_runs_the_portable_kernels():
    found = state.states(chips=("ampere",))
    assert not [name for name in found if name.startswith("hopper")]
    assert results.kernels_of(CASE, "tilewise", FORWARD, found) == {"triton forward D64", "mask causal"}
    assert results.kernels_of(CASE, "tilewise", FORWARD, state.states()) == {"cpu"}


def test_rows_depend_on_what_they_call():
    known = state.states(chips=SM_90)
    for implementation, case, names in (
        ("tilewise", CASE, {"hopper backward D64", "mask causal"}),
        ("tilewise triton", CASE, {"triton backward D64", "mask causal"}),
        ("tilewise triton", Case(512, 16, 64, 64, "bf16"), {"triton single D64"}),
        ("tilewise", Case(512, 16, 64, 64, "bf16"), {"triton backward D64"}),
        ("tilewise bf16x6", Case(4, 12, 256, 128, "fp32"), {"hopper fp32 backward D128"}),
        ("tilewise bf16x6", Case(4, 12, 256, 256, "fp32"), {"triton fp32 backward D256"}),
        ("tilewise tf32", Case(4, 12, 256, 64, "fp32"), {"triton fp32 backward D64"}),
        ("ALiBi", Case(2, 16, 8192, 128, "bf16", True, variant="ALiBi"),
         {"hopper backward D128", "mask causal", "score alibi"}),
        ("sdpa cudnn", CASE, set()),
    ):  # fmt: skip
        assert results.kernels_of(case, implementation, BACKWARD, known) == names
        assert names <= set(known)


def test_a_rename_carries_results_over_where_no_count_of_an_instruction_changed(package, monkeypatch, capsys):
    edit(package / "rotary/kernel.py", "OFFSETS", "STARTS")  # a field's name stands in the code
    edit(package / "hopper/tiles.py", "256: Forward(2, 64, 1, 2,", "256: Forward(2, 64, 1, 3,")
    assert changed(package) == [*EIGHT_BITS, "hopper forward D256", "rotary"]
    monkeypatch.setattr(states, "source", lambda *arguments: nullcontext(package.parent))
    counts = {"hopper forward D256 causal 1": {"HGMMA": 8}, "rotary 2": {"FMUL": 4}}
    later = counts | {"hopper forward D256 causal 1": {"HGMMA": 9}}
    monkeypatch.setattr(states, "instructions", lambda tree: (counts if tree == states.ROOT else later).items())
    (one,) = states.carry("a revision")
    before = state.states.__wrapped__(package, SM_90)
    assert (one["old"], one["new"]) == (before["rotary"], state.states(chips=SM_90)["rotary"])
    assert (one["kernel"], one["instructions"]) == ("rotary", 4)
    assert "hopper forward D256 has changed, and its instructions with it" in capsys.readouterr().out


def test_a_result_that_knows_its_commit_gets_the_states_of_it(package, monkeypatch, tmp_path):
    monkeypatch.setattr(states, "source", lambda *arguments: nullcontext(package.parent))
    file, versions = tmp_path / "card.json", {"cuda": "13.0"}
    env = {"commit": "abc", "kernels": "told", "versions": versions}
    runs = {"paper": {"environment": env}, "long": {"environment": env | {"commit": "abc+", "kernels": "unknown"}}}
    file.write_text(json.dumps({"suites": runs}))
    states.date([file])
    assert json.loads(file.read_text())["kernels"] == {"told": state.states(chips=SM_90)}


def pages(folder, before):
    """The performance page of a file whose kernels were these."""
    times = dict.fromkeys(("milliseconds", "milliseconds_p20", "milliseconds_p80", "tflops", "matmul_tflops"), 1.0)
    rows = [Row(asdict(SUITES["paper"].cases[0]), "tilewise", pass_, **times) for pass_ in (FORWARD, BACKWARD)]
    file = folder / "results" / "card" / "bench.json"
    env = {"device": "a card", "when": "2026-11-23", "commit": "abc", "kernels": "told", "versions": {}}
    results.merge(file, "paper", rows, env, partial=False)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"kernels": {"told": before}}))
    return report.write(folder / "results", folder / "docs").read_text()


def test_one_kernel_changes_and_only_its_rows_turn_old(tmp_path):
    now = state.states(chips=SM_90)
    assert "changed since" not in pages(tmp_path, now)
    assert "changed since" not in pages(tmp_path, now | {"hopper forward D128": "0", "triton forward D64": "0"})
    page = pages(tmp_path, now | {"hopper backward D64": "0"})
    assert "**hopper backward D64 has changed since: its rows are of older kernels.**" in page


def test_what_was_carried_over_is_not_old(tmp_path):
    now = state.states(chips=SM_90)
    pairs = [("0", "1"), ("1", now["hopper backward D64"])]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / state.CARRIED).write_text(json.dumps([{"old": a, "new": b} for a, b in pairs]))
    assert "changed since" not in pages(tmp_path, now | {"hopper backward D64": "0"})
    assert "changed since" in pages(tmp_path, now | {"hopper backward D64": "2"})
