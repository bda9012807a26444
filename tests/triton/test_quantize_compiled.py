"""The kernels that quantize Q, K and V compile for chips that are not here, with rotary about as well as without."""

import pytest
from known import remember
from scripts import alike, folder_of

pytest.importorskip("triton")
MORE = 128
"""Bytes that a thread may keep in local memory for rotary."""


@pytest.mark.compile
@pytest.mark.parametrize(
    ("target", "release"), [*((name, "oldest") for name in ("sm_80", "sm_90", "gfx942")), ("sm_90", "newest")]
)
def test_rotary_spills_little_and_reads_16_bytes_at_a_time(target, release):
    found, rows = alike("triton/quantize_compiled.py", target, "128", folder=folder_of(release))
    assert len(rows) == 6
    plain = {one["kernel"]: one for one in rows if one["pairs"] is None}
    for one in [one for one in rows if "known" not in one]:
        without = plain[one["kernel"]]
        assert one["spills"] <= without["spills"] + MORE, (one, without)
        if one["kernel"] == "attention_quantize" and target != "gfx942":
            assert one["narrow"] <= without["narrow"], (one, without)
    remember(found[0]["triton"], f"triton/quantize_compiled.py {target}", found)
