"""Tier 3 for the ablations: every changed kernel compiles for sm_90, and differs in what it changes."""

import pytest
from hopper.test_compile import SHARED
from scripts import lines

from studies.ablation.changes import CHANGES

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def compiled():
    """What became of every kernel, by change, head size and mask."""
    return {(row["change"], row["D"], row["causal"]): row for row in lines("studies/offline_ablation.py")}


def pairs(compiled, name):
    """A change's kernels, each with the one that it changes."""
    backend = CHANGES[name].backend
    found = [(compiled[backend, D, causal], row) for (change, D, causal), row in compiled.items() if change == name]
    assert found
    return found


def test_every_change_compiles_well(compiled):
    for name in CHANGES:
        for _, after in pairs(compiled, name):
            assert after["matrix"] == ["HGMMA"], name
            assert after["shared"] <= SHARED, name
            assert after["spills"] <= 1, name
            assert after["tma"] == (CHANGES[name].backend == "hopper"), name


def test_every_change_is_another_program(compiled):
    for name in CHANGES:
        for before, after in pairs(compiled, name):
            same_code = before["code"] == after["code"]
            assert same_code == (name == "without persistence"), name


def test_without_persistence_there_is_a_program_for_every_tile(compiled):
    ((before, after),) = pairs(compiled, "without persistence")
    assert (before["programs"], after["programs"]) == (132, 4 * 16 * 4096 // 128)


def test_without_warp_roles_no_registers_change_hands(compiled):
    for before, after in pairs(compiled, "without warp roles"):
        assert before["roles"]
        assert not after["roles"]
        assert after["waits"] == [["1", "0"]], "S(j + 1) and P(j) V(j) still run side by side"


def test_without_overlap_all_products_are_over_before_the_softmax(compiled):
    for before, after in pairs(compiled, "without overlap"):
        assert all(waits[0] == "1" for waits in before["waits"])
        assert all(waits[0] == "0" for waits in after["waits"])


def test_ping_pong_is_a_named_barrier_in_the_loop(compiled):
    for name in ("without ping-pong", "with ping-pong"):
        for before, after in pairs(compiled, name):
            assert after["turns"] == (name == "with ping-pong") != before["turns"]
