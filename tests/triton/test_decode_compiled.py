"""The kernels that split keys compile for chips that are not here: no spills, and 16-byte copies in flight.

What is known (known.py) is not compiled.
"""

import pytest
from known import remember
from scripts import alike

pytest.importorskip("triton")
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory of a block."""
TWO_FIT = "D128 page 64", "D128 contiguous", "D128 e4m3"
"""Calls of which Hopper's multiprocessor runs two programs."""
FIRST = "D128 page 64"
ORDER = {"attention_decode": ["launch_dependents", "wait"], "attention_combine": ["wait"]}
"""How kernels order themselves on Hopper. If the next call began beside `attention_combine`, two of its programs would
share a multiprocessor."""


@pytest.mark.compile
@pytest.mark.parametrize("target", SHARED)
def test_every_row_compiles_well(target):
    found, rows = alike("triton/decode_compiled.py", target)
    assert len(rows) >= 13
    of_decode = {row["case"]: row for row in rows if row["kernel"] == "attention_decode"}
    assert target != "sm_90" or of_decode.keys() >= set(TWO_FIT)
    assert {row["kernel"] for row in rows if row["case"] == FIRST} == ORDER.keys()
    if "known" not in rows[0]:
        wrong = [(fault, row) for row in rows for fault in faults(target, row)]
        assert not wrong
        if target in ("sm_90", "sm_100"):
            # Triton would move the load of Q out of the loop, if the mask did not name the tile
            assert of_decode["D128 contiguous"]["copies"] > of_decode[FIRST]["copies"]
    remember(found[0]["triton"], f"triton/decode_compiled.py {target}", found)


def faults(target, row):
    """What is wrong with a kernel."""
    found = []
    if row["spills"]:
        found.append("it spills")
    if row["shared"] > SHARED[target] * 1024:
        found.append("its shared memory does not fit")
    if row["kernel"] == "attention_decode" and "fp32" not in row["case"] and "prefill" not in row["case"]:
        # two buffers of K and of V: while one is used, four copies of the next may be in flight
        if row["copies"] < 12:
            found.append("keys are not copied 16 bytes at a time")
        if target != "gfx942" and max(row["waits"]) < 2:
            found.append("keys are not copied ahead")
    two_fit = 2 * row["shared"] <= 227 * 1024 and 2 * 128 * row["registers"] <= 65536
    if target == "sm_90" and row["kernel"] == "attention_decode" and row["case"] in TWO_FIT and not two_fit:
        found.append("two programs do not fit a multiprocessor")
    if target == "sm_90" and row["case"] == FIRST and row["order"] != ORDER[row["kernel"]]:
        found.append("another kernel than combine begins early")
    return found


def test_a_kernel_with_faults_is_found():
    row = {"kernel": "attention_decode", "case": FIRST, "spills": 8, "shared": 1 << 20, "registers": 255, "copies": 4,
           "waits": [0], "order": []}  # fmt: skip
    assert len(faults("sm_90", row)) == 6
    good = {"spills": 0, "shared": 65536, "registers": 128, "copies": 16, "waits": [0, 2]}
    assert not faults("sm_90", row | good | {"order": ["launch_dependents", "wait"]})
