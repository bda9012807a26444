"""The kernels that split keys compile for chips that are not here: no spills, and 16-byte copies in flight."""

import pytest
from scripts import lines

pytest.importorskip("triton")
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory of a block."""


pytestmark = pytest.mark.compile


@pytest.fixture(scope="module", params=SHARED)
def compiled(request):
    return request.param, lines("triton/decode_compiled.py", request.param)


def test_every_row_fits_without_spills(compiled):
    target, found = compiled
    assert len(found) >= 13
    for one in found:
        assert one["spills"] == 0, one
        assert one["shared"] <= SHARED[target] * 1024, one


def test_keys_are_copied_16_bytes_at_a_time_and_ahead(compiled):
    """Two buffers of K and of V: while one is used, four copies of the next may be in flight."""
    target, found = compiled
    for one in found:
        if one["kernel"] == "attention_decode" and "fp32" not in one["case"] and "prefill" not in one["case"]:
            assert one["copies"] >= 12, one
            assert target == "gfx942" or max(one["waits"]) >= 2, one


def test_two_programs_fit_a_multiprocessor_of_hopper(compiled):
    target, found = compiled
    if target == "sm_90":
        cases = "D128 page 64", "D128 contiguous", "D128 e4m3"
        those = [one for one in found if one["case"] in cases and one["kernel"] == "attention_decode"]
        assert len(those) == len(cases)
        for one in those:
            assert 2 * one["shared"] <= 227 * 1024, one
            assert 2 * 128 * one["registers"] <= 65536, one


def test_q_is_copied_ahead_with_contiguous_keys_on_hopper(compiled):
    """Triton would move its load out of the loop, if the mask did not name the tile."""
    target, found = compiled
    if target in ("sm_90", "sm_100"):
        copies = {one["case"]: one["copies"] for one in found if one["kernel"] == "attention_decode"}
        assert copies["D128 contiguous"] > copies["D128 page 64"]


def test_only_combine_begins_early_on_hopper(compiled):
    """If the next call began beside `attention_combine`, two of its programs would share a multiprocessor."""
    target, found = compiled
    if target == "sm_90":
        order = {one["kernel"]: one["order"] for one in found if one["case"] == "D128 page 64"}
        assert order == {"attention_decode": ["launch_dependents", "wait"], "attention_combine": ["wait"]}
