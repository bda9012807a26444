"""Tier 3 for the experiment: matrix instructions really sum in what was asked for."""

import pytest
from scripts import folder_of, lines

pytest.importorskip("triton")
pytestmark = pytest.mark.compile


@pytest.fixture(scope="module", params=["sm_80 oldest", "sm_90 oldest", "sm_90 newest"])
def compiled(request):
    """What became of every combination."""
    target, release = request.param.split()
    rows = lines("studies/accumulation/offline.py", target, folder=folder_of(release))
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
