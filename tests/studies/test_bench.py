"""The benchmark times only who is right, says why of everybody else, and keeps its results apart by suite."""

import itertools
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewise as tw
from studies.app import app
from studies.bench import measure, results, tables
from studies.bench.accuracy import Inputs, Truth, _errors, run_once
from studies.bench.engine import run
from studies.bench.peers import PEERS, SEED, Peer
from studies.bench.results import Row
from studies.bench.suites import BACKWARD, BOTH, FORWARD, SUITES, Case, Suite
from studies.pages import field, report
from tilewise.attention import reference
from tilewise.values.products import PRECISIONS

CPU = torch.device("cpu")
PAIRS = ((512, {}), (1024, {"o": 1.0}))
SMALL = Case(batch=2, heads=2, length=48, head_size=16, dtype="fp32", causal=True)


def suite(*peers, cases=(SMALL,), passes=(FORWARD, BACKWARD)):
    return Suite("cpu", "small", cases, passes, peers, rounds=2, matmul=64, quick_lengths=(48,))


def rows_of(*peers, **changes):
    """Every row of a small suite, by implementation and pass; a peer is a name or a Peer."""
    known = PEERS | {peer.name: peer for peer in peers if isinstance(peer, Peer)}
    names = [peer if isinstance(peer, str) else peer.name for peer in peers]
    rows = [row for case in run(suite(*names, **changes), CPU, peers=known) for row in case]
    return {(row.implementation, row.pass_): row for row in rows}


def almost(factor):
    """tilewise, with a result that is off by a factor."""
    return lambda case, device: lambda q, k, v: tw.attention(q, k, v, mask=tw.Causal()) * factor


def measured_rows(cases=SUITES["classic"].cases, ours=2.0, standard=8.0):
    """Rows as if tilewise took 2 ms and 2 MB, and standard attention four times that."""
    return [
        Row(asdict(case), name, BOTH, milliseconds=t, milliseconds_p20=t, milliseconds_p80=t, tflops=1.0 / t,
            matmul_tflops=1.0, of_matmul=1.0 / t, peak_bytes=int(t * 1e6), error=1e-3, error_plain=1e-3)
        for case in cases for name, t in (("tilewise", ours), ("standard", standard))
    ]  # fmt: skip


def test_every_suite_says_what_it_shows():
    for name, each in SUITES.items():
        assert isinstance(tables.headlines(name, measured_rows(each.cases[:1])), list), name


def test_a_right_result_is_timed():
    rows = rows_of("tilewise", "tilewise tiled", "standard", "sdpa")
    for row in rows.values():
        assert row.status == "ok", row
        assert row.milliseconds_p20 <= row.milliseconds <= row.milliseconds_p80
        assert row.tflops == pytest.approx(SMALL.flops(row.pass_) / row.milliseconds / 1e9)
        assert row.of_matmul == pytest.approx(row.tflops / row.matmul_tflops)
        assert 0.0 < row.error < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_values_may_have_another_head_size(dtype):
    case = Case(batch=2, heads=2, length=60, head_size=192, dtype=dtype, causal=True, variant="values of 128")
    x = Inputs.random(case, CPU)
    peer = PEERS["tilewise"]
    results = run_once(peer, peer.prepare(case, CPU), x)
    assert [t.shape[-1] for t in results.values()] == [128, 192, 192, 128]
    truth = Truth(case, x)
    assert not truth.judge(results).wrong
    assert truth.judge({**results, "dv": 1.1 * results["dv"]}).wrong == ("dv",)
    assert case.flops(FORWARD) == 2 * 2 * 2 * 60 * 60 * (192 + 128) / 2


def test_a_suite_warms_each_contender_up_before_each_sample():
    called = []

    def prepare(case, device):
        attend = almost(1.0)(case, device)
        return lambda *operands: called.append(time.perf_counter()) or attend(*operands)

    warmed = replace(suite("counted", passes=(FORWARD,)), warm=0.3)
    begin = time.perf_counter()
    for _ in run(warmed, CPU, peers=PEERS | {"counted": Peer("counted", prepare)}):
        pass
    assert called[-1] - begin >= 2 * 0.3  # it has two rounds
    assert len(called) > 20  # a call takes about a millisecond


@pytest.mark.parametrize("factor", [1.001, float("nan"), float("inf"), 0.0])
def test_a_wrong_result_is_never_timed(factor):
    rows = rows_of(Peer("wrong", almost(factor)), "tilewise")
    for pass_ in (FORWARD, BACKWARD):
        row = rows["wrong", pass_]
        assert (row.status, row.milliseconds, row.tflops) == ("wrong", None, None)
        assert "o" in row.why
        assert "not timed" in row.why
    assert rows["tilewise", FORWARD].status == "ok"


def test_a_wrong_gradient_spoils_the_forward_too():
    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return tw.attention(q, k, v, mask=tw.Causal())

        @staticmethod
        def backward(ctx, do):
            return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)

    rows = rows_of(Peer("leaky", lambda case, device: Leaky.apply))
    assert rows["leaky", FORWARD].status == rows["leaky", BACKWARD].status == "wrong"
    assert rows["leaky", FORWARD].why.startswith("dq, dk, dv")


def test_a_peer_that_promises_less_is_held_to_what_it_promises():
    off = Peer("off", almost(1.001))
    assert rows_of(off)["off", FORWARD].status == "wrong"
    assert rows_of(replace(off, share=2e-3))["off", FORWARD].status == "ok"
    row = rows_of(replace(off, share=2e-5))["off", FORWARD]
    assert row.status == "wrong"
    assert "2e-05 of the largest entry" in row.why


def test_precisions_say_where_they_are_no_peers_of_their_own():
    for name in PRECISIONS:
        peer = PEERS[f"tilewise {name}"]
        assert (peer.why_not(SMALL, CPU) is None) == (name == "ieee")
        assert "bf16" in (peer.why_not(replace(SMALL, dtype="bf16"), CPU) or "")
    assert set(SUITES["llmc"].peers) <= set(PEERS)
    assert rows_of("tilewise ieee")["tilewise ieee", BACKWARD].status == "ok"


def test_missing_and_failing_peers_say_why():
    def fail(case, device):
        raise RuntimeError("no such kernel\nand a long story")

    rows = rows_of("sdpa cudnn", "flex", "flash-attn 2", "flash-attn 3", "flash-attn 4", Peer("broken", fail))
    assert all(row.milliseconds is None and row.why for row in rows.values())
    assert "GPU" in rows["sdpa cudnn", FORWARD].why
    assert rows["broken", FORWARD].status == "failed"
    assert rows["broken", FORWARD].why == "RuntimeError: no such kernel"


def test_a_peer_that_is_not_installed_says_so():
    gpu = torch.device("cuda")
    assert "flash_attn_interface" in (PEERS["flash-attn 3"].why_not(SMALL, gpu) or "")
    assert "dropout" in (PEERS["flex"].why_not(replace(SMALL, dropout=0.1), gpu) or "")


def test_the_time_budget_leaves_rows_that_say_so():
    cases = (SMALL, replace(SMALL, length=64))
    rows = [row for case in run(suite("tilewise", cases=cases), CPU, seconds=0.0) for row in case]
    assert [row.status for row in rows] == ["skipped"] * 4
    assert "budget" in rows[-1].why


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_truth_is_the_specification(dropout):
    case = replace(SMALL, dropout=dropout)
    x = Inputs.random(case, CPU)
    truth = Truth(case, x)
    q, k, v, do = (t.detach().double() for t in x[:4])
    options = {"mask": tw.Causal(), "dropout": dropout, "seed": SEED}
    o = reference.attention(q, k, v, **options)[0]
    grads = reference.gradients(q, k, v, do, **options)
    for (b, h), exact in zip(truth.heads, truth.exact, strict=True):
        for mine, whole in zip(exact.values(), (o, *grads[:3]), strict=True):
            torch.testing.assert_close(mine, whole[b, :, h : h + 1].transpose(0, 1))


@pytest.mark.parametrize(("length", "seed"), [(64, 5), (64, 7), (128, 9), (256, 2)])
def test_fp32_is_not_judged_by_the_luck_of_one_order(length, seed):
    case = Case(2, 4, length, 64, "fp32", causal=True)
    x = Inputs.random(case, CPU, seed)
    truth = Truth(case, x)
    lucky = _errors(truth.by_torch, truth.exact)
    assert all(truth.plain[name] >= lucky[name] for name in lucky)
    for name in ("standard", "sdpa", "sdpa math", "tilewise tiled"):
        found = run_once(PEERS[name], PEERS[name].prepare(case, CPU), x)
        assert truth.judge(found).wrong == ()
        for tensor in found:
            far = 4.0 * truth.limit[tensor] * torch.ones_like(found[tensor])
            assert truth.judge(found | {tensor: found[tensor] + far}).wrong == (tensor,)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_types_are_judged_by_one_order(dtype):
    case = replace(SMALL, dtype=dtype)
    truth = Truth(case, Inputs.random(case, CPU))
    assert truth.plain == _errors(truth.by_torch, truth.exact)


@pytest.mark.parametrize("name", ["tilewise", "tilewise tiled"])
def test_dropout_is_judged_with_its_own_decisions(name):
    case = replace(SMALL, dropout=0.2)
    x = Inputs.random(case, CPU)
    truth = Truth(case, x)
    assert truth.judge(run_once(PEERS[name], PEERS[name].prepare(case, CPU), x)).wrong == ()
    other = replace(case, dropout=0.3)
    assert truth.judge(run_once(PEERS[name], PEERS[name].prepare(other, CPU), x)).wrong


def test_arithmetic_is_counted_as_documented():
    case = Case(2, 3, 5, 7, "fp32")
    assert case.flops(FORWARD) == 4 * 2 * 3 * 5 * 5 * 7
    assert replace(case, causal=True).flops(BACKWARD) == 2.5 / 2 * case.flops(FORWARD)
    assert case.flops(BOTH) == case.flops(FORWARD) + case.flops(BACKWARD)


def test_the_paper_suite_is_16k_tokens_of_width_2048():
    cases = SUITES["paper"].cases
    assert {case.batch * case.length for case in cases} == {16384}
    assert {case.heads * case.head_size for case in cases} == {2048}
    assert len(set(map(str, cases))) == len(cases) == 36


def test_spread():
    assert measure.spread([3.0]) == (3.0, 3.0, 3.0)
    assert measure.spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (2.0, 3.5, 5.0)


def test_memory_of_a_process_sees_quadratic_against_linear():
    case = Case(1, 2, 1536, 32, "fp32")
    standard, ours = (measure.peak_memory_of_process(case, name, BOTH) for name in ("standard", "tilewise"))
    scores = case.heads * case.length**2 * 4
    assert standard > 2 * scores
    assert ours < scores


def test_one_suite_replaces_only_its_own_rows(tmp_path):
    file, env = tmp_path / "card.json", results.environment(CPU)
    rows = measured_rows()
    results.merge(file, "classic", rows, env, partial=False)
    results.merge(file, "paper", rows[:2], env, partial=True)
    results.merge(file, "classic", rows[:4], env, partial=False)
    content = results.load(file)
    assert {name: len(run["rows"]) for name, run in content["suites"].items()} == {"classic": 4, "paper": 2}
    assert [asdict(row) for row in results.rows_of(content, "classic")] == [asdict(row) for row in rows[:4]]
    assert results.rows_of(content, "long") == []
    with pytest.raises(ValueError, match="must hold results of another card, got "):
        results.merge(file, "paper", rows, env | {"device": "another card"}, partial=False)
    assert results.load(file) == content


def test_a_file_says_once_what_all_rows_share_and_reads_older_forms(tmp_path):
    rows = [{"case": {"length": n, "dropout": 0.123456789}, "why": None, "ms": 1 / 3, "of": of} for n, of in PAIRS]
    content = {"device": "card", "suites": {"paper": {"rows": rows, "losses": [1 / 3]}}}
    file = tmp_path / "card.json"
    results.write(file, content)
    back = results.load(file)["suites"]["paper"]
    assert back["rows"] == [row | {"ms": 0.333333} for row in rows]
    assert back["losses"] == [1 / 3]
    assert '[1024,{"o":1.0}]' in file.read_text()
    assert file.read_text().count("dropout") == 1
    assert results.unpacked(content) == content


def test_a_devices_results_lie_in_its_folder():
    assert results.file_of(Path("r"), "NVIDIA H200") == Path("r/nvidia-h200/bench.json")
    assert results.file_of(Path("r"), "nvidia-h200", "tune.json") == Path("r/nvidia-h200/tune.json")
    for file in results.RESULTS.glob("*/bench.json"):
        assert file == results.file_of(results.RESULTS, results.load(file)["device"])


def test_the_kept_results_are_small():
    files = list(results.RESULTS.rglob("*.json"))
    assert sum(file.stat().st_size for file in files) <= 1_500_000
    for file in files:
        assert file.stat().st_size <= 500_000, f"{file.name} is larger than pre-commit takes"


def test_other_files_are_not_overwritten(tmp_path):
    file = tmp_path / "notes.json"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match="must be a results file"):
        results.merge(file, "classic", [], results.environment(CPU), partial=False)
    assert file.read_text() == "[1, 2]"


def test_headlines_say_how_much_faster_and_smaller():
    lines = tables.headlines("classic", measured_rows())
    assert any("faster than standard attention 4.0x at 128" in line for line in lines)
    assert any("less memory" in line and "4.0x at 4096" in line for line in lines)


def test_headlines_tell_what_the_host_spends_with_gradients_and_without():
    costs = {"host_microseconds": 50.0}
    lines = []
    for _ in range(2):
        rows = [replace(row, pass_=FORWARD, **costs) for row in measured_rows()]
        lines += [line for line in tables.headlines("classic", rows) if "Host" in line]
        costs["host_microseconds_no_grad"] = 40.0
    end = "(median of the cases)."
    assert lines == [
        f"Host cost of one forward call of tilewise: 50 microseconds {end}",
        f"Host cost of one forward call of tilewise: 50 microseconds, 40 without gradients {end}",
    ]


def test_the_report_of_a_run_without_times_has_no_picture(tmp_path):
    file = tmp_path / "results" / "card" / "bench.json"
    assert CliRunner().invoke(app, ["bench", "--device=cpu", "--seconds=0", f"--json={file}"]).exit_code == 0
    assert "time budget of 0 s was spent" in report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert not list((tmp_path / "docs" / "images").glob("*.png"))


def test_the_report_draws_its_pictures_and_tells_old_kernels(tmp_path):
    env = results.environment(CPU)
    rows = [*measured_rows(), Row(asdict(SUITES["classic"].cases[0]), "flash-attn 2", BOTH, "refused", "not installed")]
    results.merge(tmp_path / "results/card/bench.json", "classic", rows, env, partial=False)
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert "changed since" not in page
    assert "- flash-attn 2: not installed" in page
    for picture in ("card-classic-speedup.png", "card-classic-memory.png"):
        assert f"images/{picture}" in page
        assert (tmp_path / "docs/images" / picture).stat().st_size > 5000
    results.merge(tmp_path / "results/card/bench.json", "classic", rows, env | {"kernels": "0" * 16}, partial=False)
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert "Which kernels these were is not known" in page


def test_ratios_are_taken_among_rows_of_one_case_and_pass():
    rows = measured_rows(SUITES["llmc"].cases, ours=2.0, standard=8.0)
    grids = tables.grids(rows, tables.in_its_unit(tables.SPEEDUP, rows))
    assert [grid.lines for grid in grids] == [{"tilewise": ["4.00"] * n, "standard": ["1.00"] * n} for n in (4, 3)]
    assert tables.grids(rows, tables.in_its_unit(tables.OVER_EFFICIENT, rows)) == []


def test_the_llmc_suite_is_told_as_its_source_tells_it(tmp_path):
    shapes = [(c.batch, c.heads, c.head_size, c.causal, c.dtype) for c in SUITES["llmc"].cases]
    assert set(shapes) == {(4, 12, 64, True, "fp32"), (4, 12, 128, True, "fp32")}
    for head_size in (64, 128):
        assert {1024, 2048, 4096} <= {case.length for case in SUITES["llmc"].cases if case.head_size == head_size}
    rows = measured_rows(SUITES["llmc"].cases)
    for row in rows:
        row.pass_, row.implementation = FORWARD, row.implementation.replace("tilewise", "tilewise fp16x3")
    of_64, of_128 = tables.headlines("llmc", rows)
    assert of_64.startswith("tilewise fp16x3, head size 64, forward, against standard: 4.00x at 256, 4.00x at 1024")
    assert of_128.startswith("tilewise fp16x3, head size 128, forward, against standard: 4.00x at 1024, 4.00x at 2048")
    results.merge(tmp_path / "results/card/bench.json", "llmc", rows, results.environment(CPU), partial=False)
    report.write(tmp_path / "results", tmp_path / "docs")
    page = (tmp_path / "docs/results/fp32.md").read_text()
    assert "times of attention alone yet" not in page
    assert "No results file holds a training yet." in page
    assert "| name | 256 | 1k | 2k | 4k |" in page
    assert "**tilewise fp16x3** | **4.00**" in page
    assert (tmp_path / "docs/images/card-llmc-speedup.png").stat().st_size > 5000


def test_a_report_needs_results(tmp_path):
    with pytest.raises(ValueError, match="no results file"):
        report.write(tmp_path, tmp_path / "docs")


def test_over_the_field_is_the_median_over_cudnn_by_the_best_ones_ratio():
    case = Case(16, 16, 1024, 128, "bf16", causal=True)

    def run_of(ours, cudnn):
        times = {"tilewise": ours, "sdpa cudnn": cudnn, "standard": 99.0}
        return [Row(asdict(case), name, FORWARD, milliseconds=ms) for name, ms in times.items()]

    cells = [{"D": 128, "causal": True, "N": length, "cudnn": 500.0, "fa2": 300.0, "fa4": 500.0, "cudnn_bwd": 400.0,
              "fa2_bwd": 300.0, "fa3_bwd": 500.0, "fa4_bwd": 450.0} for length in field.LENGTHS]  # fmt: skip
    cells[1]["fa3"] = 600.0
    best = field.best_of({"rows": cells})
    assert best == {(128, True, FORWARD): (1.0, 1.2, 1.0, 1.0, 1.0, 1.0), (128, True, BACKWARD): (1.25,) * 6}
    assert field.absent({"rows": cells}) == ["FlashAttention-3 has no forward in 5 rows: head size 128 causal."]
    found = field.ratios([run_of(2.0, 1.0), run_of(1.0, 2.18), run_of(1.0, 3.0)], best)
    assert found[128, True, FORWARD][1] == pytest.approx(2.18 / 1.2)
    assert sum(not math.isnan(x) for cells in found.values() for x in cells) == 1


def test_runs_of_older_kernels_are_left_out():
    def run_of(when, kernels):
        return {"suites": {"paper": {"environment": {"when": when, "kernels": kernels}}}}

    old, new, again = run_of("2026-01-01", "a"), run_of("2026-01-03", "b"), run_of("2026-01-02", "b")
    assert results.newest([old, new, again], "paper") == [new, again]


def test_what_rows_cost_beside_their_blocks_is_found_again():
    rows = []
    for causal, length in itertools.product((False, True), (512, 1024, 4096)):
        case, n = Case(2, 4, length, 128, "bf16", causal), length // 128
        blocks = n * (n + 1) / 2 if causal else n * n
        rows.append(Row(asdict(case), "tilewise", BACKWARD, milliseconds=8 * (0.5 * blocks + 0.5 * 3.25 * n)))
    cost, off = field.beside_blocks(rows, 128, BACKWARD)
    assert cost == pytest.approx(3.25)
    assert off == pytest.approx(0, abs=1e-9)


def test_columns_of_numbers_are_aligned_right():
    lines = [["a", "**1.5**", "-", ""], ["1 b", "-2x", "+3", ""]]
    assert tables.markdown(["name", "one", "other", "none"], lines).splitlines() == [
        "| name | one | other | none |",
        "| --- | ---: | ---: | --- |",
        "| a | **1.5** | - |  |",
        "| 1 b | -2x | +3 |  |",
    ]
    assert tables.markdown(["name", "one"], []) == "| name | one |\n| --- | --- |"
