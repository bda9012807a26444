"""Tier 3 for Hopper: the Gluon kernels compile without a GPU, with the oldest and the newest Triton, and compile well.

How many local loads and stores and how many waits for all products stand in a kernel's loops is in spills.json and
may not grow; CONTRIBUTING.md has the command that measures it again. A wait too many means that ptxas put products one
after the other that were meant to run side by side. What is known (known.py) is not compiled.
"""

import json
import os
from pathlib import Path

import pytest
from known import ANEW, remember
from scripts import NEWEST, RELEASES, folder_of, lines

HERE = Path(__file__).parent
RECORD = HERE / "spills.json"
SHARED = 227 * 1024
MEANT = {
    "attention_forward": ["UTMALDG", "UTMASTG"],
    "attention_backward": ["UTMALDG", "UTMASTG", "UTMAREDG"],
    "attention_backward_by_gradient": ["UTMALDG", "UTMASTG"],
    "attention_decode": ["UTMALDG"],
    "attention_forward_fp32": ["UTMALDG"],
    "attention_backward_fp32": ["UTMALDG", "UTMAREDG"],
    "attention_backward_gather": [],
}
"""How kernels move memory by TMA: loads, stores, additions. Gradients of scores' tensors come from a Triton kernel."""
SIDE_BY_SIDE = 1024
"""Bytes within which all barriers of a kernel lie, if each has separate memory; tiles are larger."""
EVERY = {64, 128, 256}
SCRIPTS = {
    "hopper/offline.py": {
        "attention_forward": EVERY | {96, 160, 192, 224, 512}, "attention_backward": {64, 96, 128},
        "attention_backward_by_gradient": {160, 192, 224, 256},
        "attention_backward_gather": EVERY,
        "attention_decode": {64, 128, 576}, "attention_forward_fp32": {64, 128},
    },
    "hopper/offline_fp32_backward.py": {"attention_backward_fp32": {64, 128}},
}  # fmt: skip
"""The scripts that compile, with the head sizes of each kernel."""


def name(row):
    """A kernel's name in the record."""
    return f"{row['kernel']} {row['D']} {row['call']}"


def counts(row):
    """What may not grow."""
    return {"spills": row["spills"], "waits": max(row["waits"])}


def faults(row, record):
    """What is wrong with a kernel, as sentences."""
    if "known" in row:
        return []
    found = []
    if row["shared"] > SHARED:
        found.append(f"{row['shared']} bytes of shared memory, the chip has {SHARED}")
    if row["matrix"] != ["HGMMA"]:
        found.append(f"uses the matrix instructions {row['matrix']}; meant is HGMMA")
    # results in fp32 are stored from registers, beside dS
    by_tma = "wide" not in row["call"] or row["kernel"] == "attention_backward_by_gradient"
    meant = [move for move in MEANT[row["kernel"]] if move != "UTMASTG" or by_tma]
    if row["tma"] != meant:
        found.append(f"moves memory by {row['tma']}; meant are {meant}")
    if MEANT[row["kernel"]] and (not row["barriers"] or row["barriers"][-1] - row["barriers"][0] > SIDE_BY_SIDE):
        found.append(f"has barriers at {row['barriers']}: one that nobody waits for shares its memory with a tile")
    if row["unwritten"]:
        found.append(f"reads registers that nothing wrote, which is ptxas's fault: {row['unwritten'][:3]}")
    if not row["alone"]:
        found.append("has a descriptor inside a tuple, which cannot be launched")
    if name(row) not in record:
        return [*found, f"is not in {RECORD}; measure it by the command in CONTRIBUTING.md"]
    for what, count in counts(row).items():
        if count > record[name(row)][what]:
            found.append(f"{count} {what} in a loop, allowed are {record[name(row)][what]}")
    return found


@pytest.mark.compile
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_kernel_compiles_well(script, release):
    rows = lines(script, folder=folder_of(release))
    record = json.loads(RECORD.read_text()).get(rows[0]["triton"], {})
    sizes = {kernel: {row["D"] for row in rows if row["kernel"] == kernel} for kernel in SCRIPTS[script]}
    assert sizes == SCRIPTS[script]
    wrong = {name(row): found for row in rows if (found := faults(row, record))}
    assert not wrong, "\n".join(f"{kernel}: {'; '.join(found)}" for kernel, found in wrong.items())
    remember(rows[0]["triton"], script, rows)


def test_a_barrier_among_tiles_is_a_fault():
    row = {
        "kernel": "attention_backward", "D": 128, "call": "x", "shared": 1, "matrix": ["HGMMA"],
        "tma": MEANT["attention_backward"], "alone": True, "unwritten": [], "spills": 0, "waits": [0],
    }  # fmt: skip
    record = {"attention_backward 128 x": {"spills": 0, "waits": 0}}
    assert faults(row | {"barriers": [206464, 206472]}, record) == []
    for barriers in ([32768, 206464], []):
        assert "barriers" in " ".join(faults(row | {"barriers": barriers}, record))


def measure():
    """Writes the record, for every Triton there is, and the digests of all without another fault."""
    record = {}
    for folder in (None, *filter(None, [os.environ.get(NEWEST)])):
        for script in SCRIPTS:
            rows = lines(script, folder=folder, **{ANEW: "1"})
            version, kept = rows[0]["triton"], {name(row): counts(row) for row in rows}
            record[version] = record.get(version, {}) | kept
            wrong = [f"{name(row)}: {why}" for row in rows if (why := faults(row, kept))]
            print(version, *(f"{at}: {found}" for at, found in kept.items()), *wrong, sep="\n  ", flush=True)
            if not wrong:
                remember(version, script, rows)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    measure()
