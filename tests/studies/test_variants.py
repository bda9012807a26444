"""The suite of variants: each is judged as what it computes and compared with the plain call and its aim."""

from dataclasses import asdict, replace

import pytest
import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from typer.testing import CliRunner

import tilewise as tw
from studies.app import app
from studies.bench import of_torch, results, tables
from studies.bench.accuracy import NAMES, SINK, Inputs, Truth, run_once
from studies.bench.engine import run
from studies.bench.peers import PEERS, SEED
from studies.bench.results import Row
from studies.bench.suites import BACKWARD, FORWARD, SUITES, Case
from studies.bench.variants import CUTS, VARIANTS, cut, visited
from studies.pages import plots, report
from tilewise.attention import reference
from tilewise.compat import torch_flash

CPU = torch.device("cpu")
SUITE = SUITES["variants"]
CAUSAL, FULL, *BESIDE = SUITE.cases
SMALL = Case(batch=2, heads=8, length=48, head_size=16, dtype="fp32", causal=True)
CHANGES = [name for name, variant in VARIANTS.items() if variant.group == 1 and not variant.deterministic]
"""Those whose result differs from the plain call's on the same q, k, v."""


def small(name):
    return PEERS[name].computes(SMALL)


def measured(speeds, ms=3.0):
    """Rows as if the plain call took 3 ms, and a variant that divided by its speed, 1 unless it is given."""
    return [
        Row(asdict(case), name, pass_, milliseconds=(t := ms / speeds.get(name, 1.0)), milliseconds_p20=t,
            milliseconds_p80=t, tflops=1.0, matmul_tflops=2.0, of_matmul=0.5, error=1e-3, error_plain=1e-3)
        for case in (CAUSAL, FULL) for pass_ in SUITE.passes for name in SUITE.peers
        if PEERS[name].why_not(case, CPU) is None
    ]  # fmt: skip


def by_sequences(case, x):
    """o, dq, dk, dv and dsink as the specification gives them, one packed sequence after another."""
    q, k, v, do = (t.detach().double() for t in x[:4])
    sink = None if x.sink is None else x.sink.detach().double()
    options = {"mask": case.mask, "score": case.varied.score(case.heads, CPU), "sink": sink}
    options |= {"dropout": case.dropout, "seed": SEED}
    parts = zip(*(t.split(case.lengths) for t in (q, k, v, do)), strict=True) if case.varied.packed else [(q, k, v, do)]
    found = []
    for part in parts:
        q, k, v, do = (t if t.ndim == 4 else t[None] for t in part)
        o = reference.attention(q, k, v, **options)[0]
        grads = reference.gradients(q, k, v, do, **options)
        found.append((o, grads.q, grads.k, grads.v))
    joined = [torch.cat([t[0] for t in ts]) if case.varied.packed else ts[0] for ts in zip(*found, strict=True)]
    return dict(zip(NAMES, joined, strict=True)) | ({} if sink is None else {SINK: grads.sink})


@pytest.mark.parametrize("name", VARIANTS)
def test_the_truth_of_a_variant_is_the_specification(name):
    case = small(name)
    x = Inputs.random(case, CPU)
    truth = Truth(case, x)
    for mine, whole in zip(truth.exact, truth.of_heads(by_sequences(case, x)), strict=True):
        assert mine.keys() == whole.keys()
        for tensor in mine:
            torch.testing.assert_close(mine[tensor], whole[tensor], msg=lambda m, t=tensor: f"{t}: {m}")


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_order_and_form_of_plain_torch_is_the_specification(name, paper):
    truth = Truth(small(name), Inputs.random(small(name), CPU))
    for head, exact in zip(truth.by_head(torch.float64, 3, paper), truth.exact, strict=True):
        assert head.keys() == exact.keys()
        for tensor, orders in head.items():
            torch.testing.assert_close(orders, exact[tensor].expand(3, *exact[tensor].shape))
    orders = truth.by_head(torch.float32, 3, paper)[0]["dq"]
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[1], orders[2])


def test_every_sequence_and_every_group_is_judged():
    case = small("varlen")
    assert len(case.lengths) == len(CUTS) - 1
    assert {b for b, _ in Truth(case, Inputs.random(case, CPU)).heads} == set(range(5))
    case = small("GQA 4")
    assert [r["dq"].shape[0] for r in Truth(case, Inputs.random(case, CPU)).exact] == [4] * 4


@pytest.mark.parametrize("name", CHANGES)
def test_a_result_without_what_was_asked_for_is_wrong(name):
    case = small(name)
    if name == "window 1024":  # it hides nothing of 48 keys
        case = replace(case, batch=1, heads=1, length=1100)
    x = Inputs.random(case, CPU)
    truth = Truth(case, x)
    assert truth.judge(run_once(PEERS[name], PEERS[name].prepare(case, CPU), x, (FORWARD,))).wrong == ()
    batched = [t[None] if t.ndim == 3 else t for t in x[:3]]
    o = tw.attention(*batched, mask=tw.Causal()).detach()
    assert truth.judge({"o": o.view_as(x.q)}).wrong == ("o",)


def test_a_wrong_gradient_of_the_sink_is_wrong():
    case = small("sink")
    x = Inputs.random(case, CPU)
    dsink = run_once(PEERS["sink"], PEERS["sink"].prepare(case, CPU), x)[SINK]
    assert Truth(case, x).judge({SINK: dsink}).wrong == ()
    assert Truth(case, x).judge({SINK: 1.001 * dsink}).wrong == (SINK,)


@pytest.fixture
def on_cpu(monkeypatch):
    """PyTorch's attentions without a GPU: varlen_attn on tilewise's kernels, FlexAttention not compiled."""
    torch_flash.register(devices=("cpu",))
    activate_flash_attention_impl("tilewise")
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    yield
    restore_flash_attention_impl()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("peer", SUITE.beside)
@pytest.mark.parametrize("of", BESIDE, ids=str)
def test_everybody_computes_a_case_that_is_a_variant_by_itself(of, peer, on_cpu):
    packed, padded, heads = of.varied.packed, of.varied.padded, 2 * of.varied.group
    case = replace(of, batch=4 if padded else 1, heads=heads, length=2048 if packed else 160, head_size=16)
    against = {"varlen_attn": of_torch.against_varlen, "sdpa": of_torch.against_sdpa}.get(peer.split(" ")[0])
    if reason := against and against(case):
        assert PEERS[peer].why_not(of, CPU)
        pytest.skip(reason)
    x = Inputs.random(case, CPU)
    attend = PEERS["sdpa" if peer.startswith("sdpa") else peer].prepare(case, CPU)
    truth = Truth(case, x)
    if peer == "flex":  # it has no backward on a CPU
        assert truth.judge({"o": attend(*(t.detach() for t in x.leaves))}).wrong == ()
    else:
        assert truth.judge(run_once(replace(PEERS["sdpa"], name=peer), attend, x)).wrong == ()


def test_documents_and_padding_have_the_lengths_that_they_say():
    documents, *_, padded, _, _, _ = BESIDE
    assert (len(documents.lengths), min(documents.lengths), max(documents.lengths)) == (128, 64, 512)
    assert (padded.lengths[0], padded.lengths[-1], len(padded.lengths)) == (8, 512, 64)
    assert padded.real(CPU).sum(1).tolist() == list(padded.lengths)
    assert Inputs.random(replace(padded, heads=1), CPU).do[0, 8:].abs().max() == 0


def test_a_case_that_is_a_variant_by_itself_has_no_other():
    assert PEERS["softcap"].why_not(PEERS["softcap"].computes(BESIDE[0]), CPU) == "only measured beside the plain call"


def test_the_fastest_of_the_others_is_named_and_the_bar_judged():
    rows = [
        Row(asdict(BESIDE[0]), name, FORWARD, milliseconds=ms)
        for name, ms in (("tilewise", 2.0), ("flex", 3.0), ("varlen_attn", 1.0))
    ]
    assert tables.headlines("variants", rows)[-1] == (
        f"{BESIDE[0]}, forward: 0.50 of the speed of varlen_attn, at least 1.0: MISSED."
    )


def test_the_engine_times_every_variant_beside_the_plain_call():
    case = replace(SMALL, dtype="bf16")
    suite = replace(SUITE, cases=(case, replace(case, causal=False)), rounds=2, matmul=64)
    causal, full = run(suite, CPU)
    assert {row.implementation for row in causal} == {"tilewise", *VARIANTS}
    assert {row.of for row in causal} == {case}
    assert [row.why for row in causal if row.status != "ok"] == []
    assert all(row.milliseconds and row.error for row in causal)
    packed = next(row for row in causal if row.implementation == "varlen")
    assert packed.tflops == pytest.approx(small("varlen").flops(FORWARD) / packed.milliseconds / 1e9)
    assert {row.implementation for row in full if row.status == "ok"} == {"tilewise", "deterministic"}
    assert all("causal mask" in row.why for row in full if row.status != "ok")


def test_tiles_are_counted_by_sequence():
    assert visited(tw.Full(), 300) == 9
    assert visited(tw.Causal(), 300) == 6
    assert cut(CUTS[-1]) == (3000, 100, 5092, 808, 7384)
    assert sum(cut(96)) == 96

    def triangle(length):
        n = -(-length // 128)
        return n * (n + 1) / 2

    share = sum(map(triangle, cut(16384))) / (2 * triangle(8192))
    assert PEERS["varlen"].computes(CAUSAL).share == pytest.approx(share)
    window = sum(min(i + 1, 9) for i in range(64)) / triangle(8192)
    assert PEERS["window 1024"].computes(CAUSAL).share == pytest.approx(window)
    assert all(PEERS[name].computes(CAUSAL).share == 1.0 for name in VARIANTS if name not in ("varlen", "window 1024"))


def test_the_table_shows_speed_tiles_and_aims():
    rows = measured({"softcap": 0.5, "window 1024": 3.0, "varlen": 1.5})
    forward, backward, _, full = tables.prices(rows)
    assert forward.lines["tilewise"] == ["3.00", "", "", "", ""]
    assert forward.lines["softcap"] == ["6.00", "0.50", "", "", "0.65"]
    assert forward.lines["window 1024"] == ["1.00", "3.00", "3.85", "0.78", "3.20"]
    assert forward.lines["varlen"] == ["2.00", "1.50", "1.45", "1.03", "0.90 a tile"]
    assert (forward.lines["deterministic"][-1], backward.lines["deterministic"][-1]) == ("", "0.70")
    assert full.lines == {"tilewise": ["3.00", "", "", "", ""], "deterministic": ["3.00", "1.00", "", "", "0.83"]}
    lines = tables.headlines("variants", rows)
    assert lines[0] == "12 of 16 aims are met."
    assert "softcap, causal, backward: 0.50 of the plain call's speed, the aim is 0.65." in lines
    assert len(lines) == 5


def test_a_wrong_variant_is_told():
    rows = measured({})
    spoiled = next(row for row in rows if row.implementation == "ALiBi")
    spoiled.status, spoiled.milliseconds, spoiled.why = "wrong", None, "o wrong"
    assert tables.prices(rows)[0].lines["ALiBi"] == ["wrong", "", "", "", ""]
    assert any(line.startswith("WRONG: 1 rows") for line in tables.headlines("variants", rows))


def test_other_suites_have_no_such_table():
    assert tables.prices([row for row in measured({}) if row.implementation == "tilewise"]) == []


def test_reasons_of_several_are_one_line():
    rows = [Row(asdict(FULL), name, BACKWARD, "refused", "only causal") for name in ("sink", "ALiBi")]
    assert tables.reasons(rows) == ["sink, ALiBi: only causal"]


def test_the_report_shows_table_and_picture(tmp_path):
    rows = measured({"window 1024": 3.4, "softcap": 0.7, "dropout 0.1": 0.48, "varlen": 1.4})
    results.merge(tmp_path / "results/card/bench.json", "variants", rows, results.environment(CPU), partial=False)
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert "### variants: what each variant of a call costs" in page
    assert "packed as sequences of 3000, 100, 5092, 808, 7384." in page
    assert "| softcap | 4.29 | 0.70 |  |  | 0.65 |" in page
    assert (tmp_path / "docs/images/card-variants-cost.png").stat().st_size > 5000


def test_the_report_has_the_median_of_several_runs(tmp_path):
    speeds = {"dropout 0.1": (0.48, 0.52, 0.51), "varlen": (1.41, 1.2, 1.3)}
    names = "bench.json", "runs/variants-2.json", "runs/variants-3.json"
    for n, name in enumerate(names):
        rows = measured({variant: each[n] for variant, each in speeds.items()})
        results.merge(tmp_path / "results" / "card" / name, "variants", rows, results.environment(CPU), partial=False)
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    _, section = page.split("### variants, in 3 runs")
    assert "dropout 0.1 | 0.510 | 0.480 | 0.520 | 0.50 |" in section
    share = replace(CAUSAL, variant="varlen").share
    assert f"varlen | {1.3 * share:.3f} | {1.2 * share:.3f} | {1.41 * share:.3f} | 0.90 |" in section


def test_the_command_measures_prints_and_keeps(monkeypatch, tmp_path):
    case = replace(SMALL, dtype="bf16")
    monkeypatch.setitem(
        SUITES, "variants", replace(SUITE, cases=(case,), matmul=64, quick_lengths=(48,), devices=("cpu",))
    )
    options = ["bench", "--suite", "variants", "--device", "cpu", "--quick"]
    result = CliRunner().invoke(app, [*options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"what a variant costs: {case}, backward" in " ".join(result.stdout.split())
    assert "of 15 aims are met." in result.stdout
    (file,) = tmp_path.glob("*/bench.json")
    assert len(results.rows_of(results.load(file), "variants")) == 2 * (1 + len(VARIANTS))
    (picture,) = plots.draw("variants", results.rows_of(results.load(file), "variants"), tmp_path / "b")
    assert picture[0].stat().st_size > 5000
