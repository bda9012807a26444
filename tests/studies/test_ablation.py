"""The ablation suite: every change changes what it says, computes the same numbers, and shows up in tables."""

from dataclasses import asdict

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from studies.ablation.changes import CHANGES, attention, by_name, forward, problem, why_not
from studies.bench import results, tables
from studies.bench.engine import run
from studies.bench.peers import PEERS, Peer
from studies.bench.results import Row
from studies.bench.suites import FORWARD, SUITES, Case, Suite
from studies.pages import report
from tilewise.attention import reference
from tilewise.call.operands import Operands
from tilewise.tile.masks import key_range_of
from tilewise.tile.ranges import Place, key_range

SUITE = SUITES["ablation"]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter")


def launches(name, D, causal=True, length=4096):
    """A launch as it is on Hopper, and as it is changed."""
    q = torch.empty(4, length, 2048 // D, D, dtype=torch.bfloat16, device="meta")
    x = Operands(q, q, q, ())
    launch, _ = forward(problem(CHANGES[name], x, causal, "sm_90"), x)
    return launch, CHANGES[name].apply(launch)


def refused(name, D, causal=True, target="sm_90"):
    return why_not(CHANGES[name], (4, 4096, 2048 // D, D), torch.bfloat16, causal, target)


def measured(slower):
    """Rows of the whole suite as if a kernel took 2 ms, and each change a multiple of that."""
    rows = []
    for case in SUITE.cases:
        for name in SUITE.peers:
            if name in CHANGES and (why := refused(name, case.head_size, case.causal)):
                rows.append(Row(asdict(case), name, FORWARD, "refused", why))
                continue
            t = 2.0 * slower.get(name, 1.0)
            rows.append(
                Row(asdict(case), name, FORWARD, milliseconds=t, milliseconds_p20=t, milliseconds_p80=t, tflops=600 / t,
                    matmul_tflops=700.0, of_matmul=0.8 / t, peak_bytes=int(t * 1e6), error=1e-3, error_plain=1e-3)
            )  # fmt: skip
    return rows


def test_the_suite_knows_every_change():
    assert SUITE.peers == ("tilewise", "tilewise triton", *CHANGES)
    assert set(SUITE.peers) <= PEERS.keys()
    assert {change.peer for change in CHANGES.values()} == {"tilewise", "tilewise triton"}
    assert {(case.head_size, case.causal) for case in SUITE.cases} == {(D, c) for D in (64, 128, 256) for c in (0, 1)}
    assert SUITE.passes == (FORWARD,)


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("without warp roles", set()),
        ("without overlap", set()),
        ("without ping-pong", {256}),
        ("with ping-pong", {64, 128}),
        ("without persistence", set()),
        ("shortest tiles first", set()),
        ("whole corners", {64, 256}),
        ("masks on every tile", set()),
        ("triton, 4 warps", {128}),
        ("triton, 8 warps", {64, 256}),
        ("triton, keys outside", set()),
    ],
)
def test_a_change_says_where_it_changes_nothing(name, idle):
    assert {D for D in (64, 128, 256) if refused(name, D)} == idle
    assert all("would change nothing" in refused(name, D) for D in idle)


def test_reasons_against_a_change():
    assert "would change nothing" in refused("shortest tiles first", 128, causal=False)
    assert "written for sm_90" in refused("without overlap", 128, target="sm_80")
    assert refused("triton, keys outside", 128, target="sm_80") is None
    assert "needs a GPU" in PEERS["without overlap"].why_not(SUITE.cases[0], CPU)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("without overlap", "WAIT_PV", 3),
        ("without ping-pong", "PINGPONG", False),
        ("masks on every tile", "MASK_IN_LOOP", True),
    ],
)
def test_a_change_of_the_tile_changes_nothing_else(name, field, value):
    before, after = launches(name, 64)
    assert getattr(before.constants["tile"], field) != value
    assert after.constants["tile"] == before.constants["tile"]._replace(**{field: value})
    assert (after.kernel, after.programs) == (before.kernel, before.programs)


def test_programs():
    assert [one.programs for one in launches("without persistence", 128)] == [132, 4 * 16 * 32]
    assert [one.programs for one in launches("without warp roles", 64, causal=False)] == [132, 4 * 32 * 32]
    assert launches("triton, keys outside", 128)[1].programs == 4 * 16


def test_a_cap_on_registers_goes_with_its_number_of_warps():
    before, after = launches("triton, 4 warps", 64)
    assert (before.constants["num_warps"], before.constants["maxnreg"]) == (8, 128)
    assert after.constants["num_warps"] == 4
    assert "maxnreg" not in after.constants


@triton.jit
def write_order(out, order: tl.constexpr):
    """The matrix and the tile of every program."""
    program = tl.program_id(0)
    matrix, tile = order(program, 5, 7, 3)
    tl.store(out + 2 * program, matrix)
    tl.store(out + 2 * program + 1, tile)


@interpreted
def test_the_shortest_tile_first_is_the_longest_first_backwards():
    orders = []
    for one in launches("shortest tiles first", 128):
        orders.append(torch.zeros(35, 2, dtype=torch.int32))
        write_order[(35,)](orders[-1], one.constants["order"])
    longest, shortest = (order.tolist() for order in orders)
    assert longest[0] == [0, 4]
    assert shortest == [[matrix, 4 - tile] for matrix, tile in longest]
    assert sorted(shortest) == [[matrix, tile] for matrix in range(7) for tile in range(5)]


@triton.jit
def write_range(out, variant, tiles, M, B_R: tl.constexpr, B_C: tl.constexpr):
    """The key range of every query tile."""
    t = tl.program_id(0)
    lo, full_lo, full_hi, hi = key_range(variant, 0, Place(0, 0, 0, t * B_R, M, M, 0), B_R, B_C)
    tl.store(out + 4 * t, lo)
    tl.store(out + 4 * t + 1, full_lo)
    tl.store(out + 4 * t + 2, full_hi)
    tl.store(out + 4 * t + 3, hi)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("B_r", [128, 192])
def test_masks_on_every_tile_visit_the_same_tiles_and_hold_none_for_full(causal, B_r):
    M, tiles, ranges = 1024, -(-1024 // B_r), []
    for one in launches("masks on every tile", 64, causal):
        ranges.append(torch.zeros(tiles, 4, dtype=torch.int32))
        write_range[(tiles,)](ranges[-1], by_name(one)["variant"], tiles, M, B_r, 128)
    before, after = ranges
    assert torch.equal(before[:, [0, 3]], after[:, [0, 3]])
    assert (before[:, 2] > before[:, 1]).any()
    assert (after[:, 2] == after[:, 1]).all()


@triton.jit
def write_rows(out, mask, M, N: tl.constexpr):
    """How many keys each row sees."""
    i = tl.arange(0, N)
    lo, hi = key_range_of(mask, 0, i, M)
    tl.store(out + i, tl.zeros([N], tl.int32) + (hi - lo))


@interpreted
@pytest.mark.parametrize("causal", [False, True])
def test_masks_on_every_tile_hide_nothing_more(causal):
    counts = []
    for one in launches("masks on every tile", 64, causal):
        counts.append(torch.zeros(256, dtype=torch.int32))
        write_rows[(1,)](counts[-1], by_name(one)["variant"].mask, 256, 256)
    assert torch.equal(counts[0], torch.arange(1, 257) if causal else torch.full((256,), 256))
    assert torch.equal(*counts)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 64, 150])
def test_keys_outside_computes_attention(causal, length):
    q, k, v = (torch.randn(2, length, 2, 16) for _ in range(3))
    x, change = Operands(q, k, v, ()), CHANGES["triton, keys outside"]
    launch, saved = forward(problem(change, x, causal, "cpu"), x)
    change.apply(launch)._replace(compiled={}).run()
    wide = (t.double() for t in (q, k, v))
    o, lse = reference.attention(*wide, mask=tw.Causal() if causal else tw.Full())
    torch.testing.assert_close(saved.o.double(), o, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(saved.lse.double(), lse, atol=1e-6, rtol=1e-5)


@interpreted
def test_the_engine_judges_a_forward_alone():
    case = Case(batch=1, heads=2, length=48, head_size=16, dtype="fp32", causal=True)
    attend = attention(CHANGES["triton, keys outside"], causal=True)
    right = Peer("right", lambda case, device: attend)
    wrong = Peer("wrong", lambda case, device: lambda q, k, v: 1.001 * attend(q, k, v))
    suite = Suite("ablation", "small", (case,), (FORWARD,), ("right", "wrong"), 2, 64, (48,), host=False)
    (rows,) = run(suite, CPU, peers={"right": right, "wrong": wrong})
    assert [(row.implementation, row.status) for row in rows] == [("right", "ok"), ("wrong", "wrong")]
    assert rows[0].error < 1e-5 < rows[1].error
    assert rows[1].why.startswith("o wrong by more than twice")


def test_the_table_says_how_many_times_longer():
    rows = measured({"without overlap": 1.25, "triton, keys outside": 7.0})
    shown = {grid.title: grid for grid in tables.worth(rows)}
    assert set(shown) == {f"{peer}, {n} tokens" for peer in ("tilewise", "tilewise triton") for n in ("4k", "1k")}
    long = shown["tilewise, 4k tokens"]
    assert long.columns == ("64 full", "64 causal", "128 full", "128 causal", "256 full", "256 causal")
    assert long.lines["without overlap"] == ["1.25"] * 6
    assert long.lines["with ping-pong"] == ["-", "-", "1.00", "-", "1.00", "1.00"]
    assert shown["tilewise triton, 1k tokens"].lines["triton, keys outside"] == ["7.00"] * 3
    lines = tables.headlines("ablation", rows)
    assert any(
        line.startswith("without overlap: 1.25 times the time of tilewise (geometric mean of 9") for line in lines
    )


def test_a_wrong_change_is_told():
    rows = measured({})
    spoiled = next(row for row in rows if row.implementation == "without warp roles")
    spoiled.status, spoiled.milliseconds, spoiled.why = "wrong", None, "o more than twice as wrong"
    assert "wrong" in tables.worth(rows)[0].lines["without warp roles"]
    assert any(line.startswith("WRONG: 1 rows") for line in tables.headlines("ablation", rows))


def test_other_suites_have_no_such_table():
    assert tables.worth([row for row in measured({}) if row.implementation not in CHANGES]) == []


def test_the_report_shows_table_and_picture(tmp_path):
    rows = measured({"without overlap": 1.25, "triton, keys outside": 7.0})
    results.merge(tmp_path / "results/card/bench.json", "ablation", rows, results.environment(CPU), partial=False)
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert "| without overlap | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 | 1.25 |" in page
    assert "### ablation: what each technique of the forward is worth" in page
    assert (tmp_path / "docs/images/card-ablation-worth.png").stat().st_size > 5000
