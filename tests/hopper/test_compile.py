"""Tier 3 for Hopper: the Gluon kernels compile without a GPU, with the oldest and the newest Triton, and compile well.

How many local loads and stores and how many waits for all products stand in a kernel's loops is in spills.json and
may not grow; `python tests/hopper/test_compile.py` measures it again. A wait too many means that ptxas put
products one after the other that were meant to run side by side.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RECORD = HERE / "spills.json"
SHARED = 227 * 1024
MEANT = {
    "attention_forward": ["UTMALDG", "UTMASTG"],
    "attention_backward": ["UTMALDG", "UTMASTG", "UTMAREDG"],
    "attention_decode": ["UTMALDG"],
    "attention_forward_fp32": ["UTMALDG"],
    "attention_backward_fp32": ["UTMALDG", "UTMAREDG"],
    "attention_backward_dbias": [],
}
"""How kernels move memory by TMA: loads, stores, additions. The gradient of a bias comes from a Triton kernel."""
SIDE_BY_SIDE = 1024
"""Bytes within which all barriers of a kernel lie, if each has separate memory; tiles are larger."""
RELEASES = {"oldest": None, "newest": "TILEWISE_TRITON_NEWEST"}
"""The installed Triton, and the variable that says where the newest lies (`pip install --target`)."""


def offline(folder, script="offline.py"):
    """What a script prints with the Triton of a folder, or with the installed one."""
    path = [*filter(None, [folder]), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0",
    }  # fmt: skip
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def name(row):
    """A kernel's name in the record."""
    return f"{row['kernel']} {row['D']} {row['call']}"


def counts(row):
    """What may not grow."""
    return {"spills": row["spills"], "waits": max(row["waits"])}


def faults(row, record):
    """What is wrong with a kernel, as sentences."""
    found = []
    if row["shared"] > SHARED:
        found.append(f"{row['shared']} bytes of shared memory, the chip has {SHARED}")
    if row["matrix"] != ["HGMMA"]:
        found.append(f"uses the matrix instructions {row['matrix']}; meant is HGMMA")
    # results in fp32 are stored from registers
    meant = [move for move in MEANT[row["kernel"]] if move != "UTMASTG" or "wide" not in row["call"]]
    if row["tma"] != meant:
        found.append(f"moves memory by {row['tma']}; meant are {meant}")
    if MEANT[row["kernel"]] and (not row["barriers"] or row["barriers"][-1] - row["barriers"][0] > SIDE_BY_SIDE):
        found.append(f"has barriers at {row['barriers']}: one that nobody waits for shares its memory with a tile")
    if not row["alone"]:
        found.append("has a descriptor inside a tuple, which cannot be launched")
    if name(row) not in record:
        return [*found, f"is not in {RECORD}; measure it by `python {Path(__file__).relative_to(Path.cwd())}`"]
    for what, count in counts(row).items():
        if count > record[name(row)][what]:
            found.append(f"{count} {what} in a loop, allowed are {record[name(row)][what]}")
    return found


@pytest.mark.compile
@pytest.mark.parametrize("release", RELEASES)
def test_every_kernel_compiles_well(release):
    variable = RELEASES[release]
    if variable and not os.environ.get(variable):
        pytest.skip(f"{variable} does not say where the newest Triton lies")
    rows = offline(os.environ[variable] if variable else None)
    record = json.loads(RECORD.read_text()).get(rows[0]["triton"], {})
    every = {64, 128, 256}
    for kernel, sizes in {
        "attention_forward": every,
        "attention_backward": every,
        "attention_backward_dbias": every,
        "attention_decode": {64, 128},
        "attention_forward_fp32": {64, 128},
    }.items():
        assert {row["D"] for row in rows if row["kernel"] == kernel} == sizes
    wrong = {name(row): found for row in rows if (found := faults(row, record))}
    assert not wrong, "\n".join(f"{kernel}: {'; '.join(found)}" for kernel, found in wrong.items())


@pytest.mark.compile
@pytest.mark.parametrize("release", RELEASES)
def test_the_fp32_backward_compiles_well(release):
    variable = RELEASES[release]
    if variable and not os.environ.get(variable):
        pytest.skip(f"{variable} does not say where the newest Triton lies")
    rows = offline(os.environ[variable] if variable else None, "offline_fp32_backward.py")
    record = json.loads(RECORD.read_text()).get(rows[0]["triton"], {})
    assert {(row["D"], row["call"].split()[0]) for row in rows} == set(product((64, 128), ("fp16x3", "bf16x6")))
    wrong = {name(row): found for row in rows if (found := faults(row, record))}
    assert not wrong, "\n".join(f"{kernel}: {'; '.join(found)}" for kernel, found in wrong.items())


def test_a_barrier_among_tiles_is_a_fault():
    row = {
        "kernel": "attention_backward",
        "D": 128,
        "call": "x",
        "shared": 1,
        "matrix": ["HGMMA"],
        "tma": MEANT["attention_backward"],
    }
    row |= {"alone": True, "spills": 0, "waits": [0]}
    record = {"attention_backward 128 x": {"spills": 0, "waits": 0}}
    assert faults(row | {"barriers": [206464, 206472]}, record) == []
    for barriers in ([32768, 206464], []):
        assert "barriers" in " ".join(faults(row | {"barriers": barriers}, record))


def measure():
    """Writes the record, for every Triton there is."""
    record = {}
    for folder in (None, *filter(None, [os.environ.get("TILEWISE_TRITON_NEWEST")])):
        rows = [*offline(folder), *offline(folder, "offline_fp32_backward.py")]
        record[rows[0]["triton"]] = {name(row): counts(row) for row in rows}
        print(rows[0]["triton"], *(f"{name(row)}: {counts(row)}" for row in rows), sep="\n  ", flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    measure()
