"""studies tune: what it tries, what it makes of the times, and the file through which a card gets its rows."""

import json
from dataclasses import replace

import command as package
import pytest
import torch
from typer.testing import CliRunner

import tilewise as tw
from studies.app import app
from studies.bench import results
from studies.bench.suites import Case
from studies.pages import report
from studies.tune import command, tuned
from studies.tune.rows import neighbours
from studies.tune.tuned import Candidate, Tuned
from tilewise.attention import reference
from tilewise.call import calls
from tilewise.host import tables

pytest.importorskip("triton")
from studies.tune import tune
from tilewise.hopper import tiles as hopper
from tilewise.triton import plan as planning
from tilewise.triton import tiles as portable

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TINY = Case(batch=1, heads=1, length=40, head_size=16, dtype="fp32", causal=True)
CASE = str(TINY)


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """No file, before and after."""
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    tables.read.cache_clear()
    calls.forget()
    yield
    tables.read.cache_clear()
    calls.forget()


@pytest.fixture
def _one_neighbour(monkeypatch):
    monkeypatch.setattr(tune.rows, "neighbours", lambda row: [row._replace(B_c=16)])


def test_every_row_of_a_hopper_card_is_tried(monkeypatch):
    monkeypatch.setattr(tune, "target_of", lambda device: "sm_90")
    cpu = torch.device("cpu")
    found = tune.slots(cpu, tune.cases(cpu))
    keys = {(slot.backend, slot.table, slot.key) for slot in found}
    assert keys >= {("hopper", name, key) for name, table in hopper.TABLES.items() for key in table}
    assert keys >= {
        ("triton", name, key) for name, table in portable.TABLES.items() for key in table if key[0] == "hopper"
    }
    assert len({slot.title for slot in found}) == len(found)
    assert [slot.title for slot in found if {"hopper", "backward", "D128"} <= slot.words] == ["hopper backward D128"]
    for slot in found:
        rows = tune.neighbours(slot, cpu)
        module = hopper if slot.backend == "hopper" else portable
        assert rows[0] == module.TABLES[slot.table][slot.key]
        assert len(rows) == len(set(rows)) > 3


def test_rows_that_only_dropout_reads_are_measured_with_it(monkeypatch):
    monkeypatch.setattr(tune, "target_of", lambda device: "sm_90")
    cpu = torch.device("cpu")
    for slot in tune.slots(cpu, tune.cases(cpu)):
        only = slot.title.endswith(("scores", "dropout", "small"))
        assert all(case.dropout for case in slot.cases) == any(case.dropout for case in slot.cases) == only


def made_up(*candidates):
    """A slot with these candidates."""
    return Tuned("triton", "forward", "interpreter 4 512", "triton forward 32-bit D512", "forward", [TINY.__dict__],
                 list(candidates), results.environment(torch.device("cpu")))  # fmt: skip


def row(**fields):
    return {"B_r": 32, "B_c": 32, "warps": 4, "stages": 1, "registers": None} | fields


def test_the_best_is_the_fastest_over_all_cases():
    found = made_up(
        Candidate(row(), milliseconds={"a": 2.0, "b": 4.0}, spread={"a": 0.01, "b": 0.02}),
        Candidate(row(B_c=16), milliseconds={"a": 1.0, "b": 4.0}, spread={"a": 0.01, "b": 0.01}),
        Candidate(row(B_c=64), milliseconds={"a": 4.0, "b": 1.0}),
        Candidate(row(B_c=128), "wrong", "o", milliseconds={"a": 0.1}),
    )
    assert [found.speed(c) for c in found.timed] == pytest.approx([8**-0.5, 4**-0.5, 4**-0.5])
    assert found.best is found.candidates[1]
    assert found.behind == pytest.approx(2**0.5 - 1)
    assert found.verdict() == "the row in use is 41.4 % behind B_c 16 (times spread by up to 2.0 %)"
    assert tuned.reasons(found) == ["B_c 128: wrong, o"]


@pytest.mark.parametrize(("best", "chosen"), [(1.98, 1), (1.99, 0), (2.0, 0)])
def test_a_row_changes_only_for_more_than_noise(best, chosen):
    found = made_up(Candidate(row(), milliseconds={"a": 2.0}), Candidate(row(B_c=16), milliseconds={"a": best}))
    assert found.chosen is found.candidates[chosen]


def test_without_times_of_the_row_in_use_the_best_of_the_others_is_chosen():
    found = made_up(Candidate(row(), "failed", "shared memory"), Candidate(row(B_c=16), milliseconds={"a": 1.0}))
    assert found.behind is None
    assert found.chosen is found.candidates[1]
    assert "shared memory" in found.verdict()
    nothing = made_up(Candidate(row(), "skipped", "no time"))
    assert nothing.best is nothing.chosen is nothing.behind is None
    assert "no time" in nothing.verdict()


def written(path, **fields):
    """A file whose row differs from the package's."""
    better = Candidate(row(**fields), milliseconds={CASE: 1.0})
    assert (
        tuned.write_rows(path, "cpu", [made_up(Candidate(row(), milliseconds={CASE: 2.0}), better)], {"when": "now"})
        == 1
    )
    return path


def plan():
    """The plan of a tiny call in the interpreter."""
    return planning.plan(tune._problem("triton", TINY, torch.device("cpu")))


def test_a_file_round_trips_and_plans_honour_it(tmp_path, monkeypatch):
    path = written(tmp_path / "tiles.json", B_r=16, B_c=64)
    assert plan().forward == portable.FORWARD["interpreter", 4, 512]
    monkeypatch.setenv(tables.VARIABLE, str(path))
    calls.forget()
    assert plan().forward == portable.Tiles(16, 64, 4, 1)
    assert plan().dq == portable.DQ["interpreter", 4, 512], "what the file does not have stays"
    if not torch.cuda.is_available():
        q = torch.randn(1, 40, 1, 16)
        o = tw.attention(q, q, q, mask=tw.Causal(), backend="triton")
        torch.testing.assert_close(o, reference.attention(q, q, q, mask=tw.Causal())[0])
        found = tw.explain(q, q, q, backend="triton")
        assert "forward 16x64, 4 warps, 1 stage; dkdv 32x32" in found.tiles
        assert found.tiles.endswith(f"rows of {path}")
    told = package.call("info", "--json")
    assert json.loads(told.stdout)["tiles"]["cpu"] == f"rows of {path}"


def test_other_cards_and_other_rows_of_a_file_stay(tmp_path):
    path = written(tmp_path / "tiles.json", B_c=64)
    content = json.loads(path.read_text())
    content["cards"]["another card"] = content["cards"]["cpu"]
    content["cards"]["cpu"]["rows"]["hopper"] = {"backward": {"64": hopper.BACKWARD[64]._asdict()}}
    path.write_text(json.dumps(content))
    tables.read.cache_clear()
    written(path, B_c=16)
    after = json.loads(path.read_text())["cards"]
    assert after["another card"] == content["cards"]["another card"]
    assert after["cpu"]["rows"]["hopper"] == content["cards"]["cpu"]["rows"]["hopper"]
    assert after["cpu"]["rows"]["triton"]["forward"]["interpreter 4 512"] == row(B_c=16)


def test_a_card_that_a_file_does_not_know_keeps_the_packages_rows(tmp_path, monkeypatch):
    path = written(tmp_path / "tiles.json", B_c=64)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    monkeypatch.setattr(tables, "card", lambda device: "another card")
    assert plan().forward == portable.FORWARD["interpreter", 4, 512]
    assert tables.source_of_rows(torch.device("cpu")) == f"rows of the package, none for this card in {path}"


def test_without_the_variable_nothing_is_read():
    assert tables.in_use("triton", portable.TABLES, torch.device("cpu")) is portable.TABLES
    assert tables.source_of_rows(torch.device("cpu")) == "rows of the package"


BROKEN = {
    "no json": ("{", "got other content;"),
    "a results file": (json.dumps({"device": "card", "suites": {}}), "got other content;"),
    "a list": ("[1]", "got other content;"),
    "a list for a table": (
        json.dumps({"cards": {"cpu": {"rows": {"triton": {"forward": []}}}}}),
        "got other content;",
    ),
    "another back end": (("metal", "forward", "64", {}), "got unknown back ends: metal;"),
    "another table": (("triton", "sideways", "64", {}), "got unknown tables of triton: sideways;"),
    "another row": (
        ("triton", "forward", "interpreter 4 1024", {}),
        "got unknown rows of table forward: interpreter 4 1024;",
    ),
    "another field": (("triton", "forward", "interpreter 4 512", row(depth=1)), "without exactly the fields B_r, B_c"),
    "a field too few": (("triton", "forward", "interpreter 4 512", {"B_r": 1}), "without exactly the fields B_r, B_c"),
    "text for a number": (
        ("triton", "forward", "interpreter 4 512", row(B_r="32")),
        "B_r = '32' in row interpreter 4 512",
    ),
    "a bool for a number": (("triton", "forward", "interpreter 4 512", row(B_r=True)), "B_r = True in row"),
    "rows below zero": (("triton", "forward", "interpreter 4 512", row(B_r=-16)), "B_r = -16 in row interpreter 4 512"),
    "no rows": (
        ("triton", "forward", "interpreter 4 512", row(B_r=0)),
        "B_r = 0 in row interpreter 4 512 of table forward, which is none of 8, 16, 32, 64, 128, 256, 512",
    ),
    "no power of two": (("triton", "forward", "interpreter 4 512", row(B_c=24)), "B_c = 24 in row interpreter 4 512"),
    "too many columns": (("triton", "forward", "interpreter 4 512", row(B_c=2**30)), "B_c = 1073741824 in row"),
    "three warps": (
        ("triton", "forward", "interpreter 4 512", row(warps=3)),
        "table forward, which is none of 1, 2, 4, 8, 16",
    ),
    "no stages": (("triton", "forward", "interpreter 4 512", row(stages=0)), "stages = 0 in row interpreter 4 512"),
    "registers of nobody": (("triton", "forward", "interpreter 4 512", row(registers=7)), "registers = 7 in row"),
    "nested too deep": ("[" * 100_000, "got other content;"),
    "a number of many digits": ("1" * 10_000, "got other content;"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_with_what_to_do(name, tmp_path, monkeypatch):
    content, says = BROKEN[name]
    path = tmp_path / "tiles.json"
    if isinstance(content, tuple):
        backend, table, label, fields = content
        content = json.dumps({"cards": {"cpu": {"rows": {backend: {table: {label: fields}}}}}})
    path.write_text(content)
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"must be a file of rows, got .*; remove it and write it again") as error:
        plan()
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert "unset TILEWISE_TILES" in str(error.value)


HOPPERS = {
    "B_r": 16,
    "B_c": 16,
    "warpgroups": 4,
    "q_stages": 0,
    "kv_stages": 9,
    "do_stages": -1,
    "wait_pv": 4,
    "registers": 161,
}


@pytest.mark.parametrize("field", HOPPERS)
def test_values_that_hoppers_kernels_do_not_take_are_refused(field, tmp_path, monkeypatch):
    name, table = next((name, rows) for name, rows in hopper.TABLES.items() if field in rows[64]._fields)
    fields = table[64]._asdict() | {field: HOPPERS[field]}
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"cards": {"cpu": {"rows": {"hopper": {name: {"64": fields}}}}}}))
    monkeypatch.setenv(tables.VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"{field} = {HOPPERS[field]} in row 64 of table {name}, which is none of"):
        tables.in_use("hopper", hopper.TABLES, torch.device("cpu"))


@pytest.mark.parametrize("module", [portable, hopper], ids=["triton", "hopper"])
def test_every_row_and_every_neighbour_is_allowed(module):
    allowed = tables.ALLOWED[module.__name__.split(".")[1]]
    for table in module.TABLES.values():
        for row in [other for own in table.values() for other in (own, *neighbours(own))]:
            for field, values in allowed.items():
                assert row._asdict().get(field, values[0]) in values, f"{field} of {row}"


def test_a_missing_file_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "tiles.json"))
    with pytest.raises(ValueError, match=r"tiles\.json, which does not exist; write it with"):
        plan()


def call(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments], prog_name="tilewise")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    result = call("--results", str(tmp_path))
    assert result.exit_code == 2
    assert "PyTorch sees none; run it on the GPU" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.usefixtures("_one_neighbour")
def test_the_whole_command_on_a_tiny_case(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "pick_gpu", lambda: DEVICE)
    monkeypatch.setattr(tune, "cases", lambda device, quick: [TINY])
    arguments = ["--quick", "--match", "triton", "--results", str(tmp_path), "--write", str(tmp_path / "tiles.json")]
    result = call(*arguments, "--match", "forward")
    assert result.exit_code == 0, result.output
    assert "B_c 16" in result.output
    result = call(*arguments, "--match", "dq", "--json")
    assert json.loads(result.stdout)["slots"][0]["table"] == "dq"
    (file,) = tmp_path.glob("*/tune.json")
    kept = {slot.table: slot for slot in tuned.load(file)["slots"]}
    assert set(kept) == {"forward", "dq"}
    for slot in kept.values():
        assert [c.status for c in slot.candidates] == ["ok", "ok"], slot
        assert all(c.milliseconds[CASE] > 0 for c in slot.candidates)
        assert slot.environment["kernels"] == results.environment(DEVICE)["kernels"]
    (card,) = json.loads((tmp_path / "tiles.json").read_text())["cards"].values()
    assert set(card["rows"]["triton"]) == {"forward", "dq"}
    result = call("--match", "nonsense", "--results", str(tmp_path))
    assert result.exit_code == 2
    assert "must be words of a row's name, got nonsense" in " ".join(result.output.replace("│", " ").split())


def test_wrong_and_failing_rows_are_listed_with_their_reasons(monkeypatch):
    monkeypatch.setattr(tune.rows, "neighbours", lambda row: [row._replace(B_c=16), row._replace(B_r=16)])
    real = tune.Call.forward

    def forward(self, plan):
        if plan.forward.B_r == 16:
            raise RuntimeError("out of resource: shared memory\nand more")
        saved = real(self, plan)
        return saved._replace(o=saved.o * 1.01) if plan.forward.B_c == 16 else saved

    monkeypatch.setattr(tune.Call, "forward", forward)
    slot = next(slot for slot in tune.slots(DEVICE, [TINY]) if slot.table == "forward")
    (found,) = tune.tune([slot], DEVICE, None, 1)
    assert [c.status for c in found.candidates] == ["ok", "wrong", "failed"]
    assert found.candidates[1].why == "o, dq, dk more than twice as wrong as plain torch"
    assert found.candidates[2].why == "RuntimeError: out of resource: shared memory"
    assert found.best is found.present
    assert len(tuned.reasons(found)) == 2


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "internal error\n`ptxas` stderr:\nptxas fatal   : insufficient registers\nRepro",
            "ptxas fatal   : insufficient",
        ),
        ("\nfirst\nsecond", "first"),
        ("", ""),
    ],
)
def test_a_reason_is_one_line_of_the_message(message, told):
    candidate = Candidate(row())
    with tune._excused(candidate):
        raise RuntimeError(message)
    assert candidate.why.startswith(f"RuntimeError: {told}")
    assert "\n" not in candidate.why


def test_the_time_budget_leaves_rows_that_say_so():
    found = list(tune.tune(tune.slots(DEVICE, [TINY]), DEVICE, 0.0, 1))
    assert {c.status for one in found for c in one.candidates} == {"skipped"}
    assert "budget" in found[-1].verdict()


def test_results_of_another_card_or_kind_are_not_overwritten(tmp_path):
    file = tmp_path / "tune.json"
    tuned.merge(file, "card", [made_up(Candidate(row()))])
    tuned.merge(file, "card", [made_up(Candidate(row(), "skipped", "no time"))])
    assert tuned.load(file)["slots"][0].present.status == "ok", "what was skipped is still known from before"
    with pytest.raises(ValueError, match="must hold measurements of another, got card"):
        tuned.merge(file, "another", [made_up(Candidate(row()))])
    file.write_text(json.dumps({"device": "card", "suites": {}}))
    with pytest.raises(ValueError, match="must be a file of `tune`"):
        tuned.load(file)


def test_the_report_draws_the_tables(tmp_path):
    found = made_up(
        Candidate(row(), milliseconds={CASE: 2.0}, spread={CASE: 0.01}),
        Candidate(row(B_c=16), milliseconds={CASE: 1.0}, spread={CASE: 0.01}),
        Candidate(row(B_r=128), "failed", "out of resource: shared memory"),
    )
    file = tmp_path / "results/card/tune.json"
    tuned.merge(file, "card", [found])
    page = report.write(tmp_path / "results", tmp_path / "docs").read_text()
    assert "## Tiles of card" in page
    assert "the row in use is 100.0 % behind B_c 16 (times spread by up to 1.0 %)" in page
    assert "| B_c 16 (best) | 1.0000 | 1.000 |" in page
    assert "- B_r 128: failed, out of resource: shared memory" in page
    assert "changed since" not in page
    tuned.merge(file, "card", [replace(found, environment=found.environment | {"kernels": "0" * 16})])
    assert "is not known" in report.write(tmp_path / "results", tmp_path / "docs").read_text()
