"""The GPTs: one seed gives one training, whichever attention it uses."""

import array
import json
from dataclasses import asdict, replace
from itertools import islice

import pytest
import torch
from typer.testing import CliRunner

from studies.app import app
from studies.bench.results import Row, environment, load
from studies.bench.suites import BOTH, SUITES
from studies.demo.page import write_page
from studies.pages import report
from studies.training import contest, contexts, trainer
from studies.training import contests as trainings
from studies.training.comparison import NAMES, Comparison
from studies.training.contest import CONTENDERS
from studies.training.contests import Contest, Trial
from studies.training.gpt import GPT, batches, in_order, library_text, move, read_tokens
from studies.training.pictures import training
from studies.training.trainer import Settings, attend_with, train

SMALL = Settings(steps=4, context=64, batch=2, layers=2, heads=2, width=32)
SIZES = ("steps", "context", "batch", "layers", "heads", "width")


def comparison(difference=0.0):
    losses = [5.0, 4.0, 3.0]
    return Comparison(
        SMALL, "cpu", {"standard": losses, "tilewise": [*losses[:2], 3.0 + difference]},
        {"standard": 2.0, "tilewise": 1.0}, {"standard": 400_000_000, "tilewise": 100_000_000},
    )  # fmt: skip


def test_both_attentions_give_the_same_loss_and_gradients():
    data = next(batches(library_text(), SMALL.batch, SMALL.context, seed=0))
    found = {}
    for name in (*NAMES, "tilewise ieee"):
        torch.manual_seed(0)
        model = GPT(SMALL.layers, SMALL.heads, SMALL.width, SMALL.context, attend_with(name, SMALL))
        loss = model.loss(data)
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found["tilewise"], found["standard"])
    torch.testing.assert_close(found["tilewise ieee"], found["standard"])


def test_the_text_is_the_standard_library():
    text = library_text()
    assert text.dtype == torch.uint8
    assert len(text) > 1_000_000
    assert b"def loads(" in bytes(text.numpy())


def test_batches_repeat_with_their_seed():
    text = library_text()
    first, again, other = (next(batches(text, 3, 16, seed)) for seed in (1, 1, 2))
    assert first.shape == (3, 17)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_train_compares_two_processes(tmp_path):
    options = [f"--{name}={getattr(SMALL, name)}" for name in SIZES]
    file, picture = tmp_path / "new" / "t.json", tmp_path / "t.png"
    result = CliRunner().invoke(app, ["train", "--device=cpu", *options, f"--json={file}", f"--plot={picture}"])
    assert result.exit_code == 0, result.output
    assert "equal but for rounding" in result.stdout
    summary = json.loads(file.read_text())
    assert summary["backend"] == "cpu"
    assert len(summary["losses_standard"]) == len(summary["losses_tilewise"]) == SMALL.steps
    assert summary["losses_equal"]
    assert 0.0 <= summary["largest_difference"] < 1e-4
    for key in ("time_s", "peak_bytes"):
        assert set(summary[key]) == {"standard", "tilewise"}
    assert picture.stat().st_size > 5000


def test_a_difference_beyond_rounding_is_told():
    assert comparison(1e-6).equal
    assert not comparison(1e-3).equal
    assert "DIFFER" in comparison(1e-3).verdict()


def test_a_failing_training_ends_with_a_sentence():
    small = ["--layers=1", "--heads=1", "--width=8", "--steps=1"]  # but a matrix of scores of 16 TB
    result = CliRunner().invoke(app, ["train", "--device=cpu", *small, "--context=2000000"])
    assert result.exit_code == 1
    assert "The training with standard attention failed" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"width": 33}, {"width": 1024, "heads": 2}, {"learning_rate": -1.0}, {"matmul": "low"}],
)
def test_settings_check_themselves(change):
    with pytest.raises(ValueError, match="must be"):
        replace(SMALL, **change)


def test_the_page_holds_its_pictures(tmp_path):
    picture = tmp_path / "training.png"
    training(comparison(), picture)
    env = environment(torch.device("cpu"))
    rows = [Row(asdict(SUITES["cpu"].cases[0]), "tilewise", BOTH)]
    assert rows[0].of == SUITES["cpu"].cases[0]
    page = tmp_path / "index.html"
    write_page(page, comparison(), (SUITES["cpu"], ["a <headline>"], [(picture, "a picture")]), picture, env)
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "a &lt;headline&gt;" in text
    assert "400 MB" in text
    assert "src='training.png'" not in text


# ---- GPT-2 with every attention


def token_file(path, tokens, count=None):
    """A file as llm.c writes it."""
    header = array.array("i", [20240520, 1, len(tokens) if count is None else count, *[0] * 253])
    path.write_bytes(header.tobytes() + array.array("H", tokens).tobytes())
    return path


def gpt2(*arguments):
    options = ["--layers=1", "--heads=2", "--width=16", "--context=16", "--batch=2", "--steps=3", "--device=cpu"]
    return CliRunner().invoke(app, ["train", "--model=gpt2-124m", "--precision=fp32", *options, *arguments])


def test_gpt2_is_gpt2():
    s = Settings.gpt2(torch.device("cpu"))
    with torch.device("meta"):
        model = GPT(s.layers, s.heads, s.width, s.context, attend_with("standard", s), s.vocabulary)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert (s.steps, s.batch, s.context, s.learning_rate, s.weight_decay, s.clip) == (74, 4, 1024, 3e-4, 0.0, None)


def test_tokens_are_read_in_order(tmp_path):
    text = read_tokens(token_file(tmp_path / "t.bin", [*range(40), 50256]))
    assert text.tolist() == [*range(40), 50256]
    pieces = list(in_order(text, batch=2, context=4))
    assert len(pieces) == 5
    assert pieces[1].tolist() == [[8, 9, 10, 11, 12], [12, 13, 14, 15, 16]]
    assert pieces[-1][-1, -1] == 50256


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda p: p.write_bytes(b"no tokens at all"), "not a file of tokens"),
        (lambda p: p.write_bytes(bytes(4000)), "not a file of tokens"),
        (lambda p: token_file(p, [1, 2, 3], count=9), "should hold 9 tokens"),
        (lambda p: token_file(p, [1] * 32), "a step needs 33"),
        (lambda p: token_file(p, [60000] * 99), "holds token 60000"),
    ],
)
def test_a_wrong_file_of_tokens_ends_with_a_sentence(tmp_path, write, says):
    write(tmp_path / "t.bin")
    result = gpt2(f"--tokens={tmp_path / 't.bin'}")
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_gpt2_trains_with_every_attention_that_is_there(tmp_path, monkeypatch):
    """The first in a process of its own, as users' are; the others here, which saves an import each."""
    trainings = iter([contest.train_apart])

    def apart_at_first(settings, name, alone):
        return next(trainings, train)(settings, name, alone)

    monkeypatch.setattr(contest, "train_apart", apart_at_first)
    tokens = token_file(tmp_path / "t.bin", [n * n % 50257 for n in range(200)])
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
    result = gpt2(
        f"--tokens={tokens}", f"--validation={tokens}", "--seeds=2", f"--json={file}", f"--plot={picture}",
        f"--results={tmp_path / 'results'}",
        "--attention=standard", "--attention=tilewise ieee", "--attention=sdpa efficient",
        "--attention=standard moved",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "not trained: sdpa efficient: needs a GPU" in result.stdout
    assert "Seeds alone spread" in result.stdout
    summary = json.loads(file.read_text())
    trials = {(t["attention"], t["seed"]): t for t in summary["trials"]}
    names = "standard", "tilewise ieee", "sdpa efficient", "standard moved"
    assert set(trials) == {(name, seed) for name in names for seed in (0, 1)}
    for seed in (0, 1):
        assert trials["standard moved", seed]["losses"] == pytest.approx(trials["standard", seed]["losses"], abs=1e-5)
        ours, standard = trials["tilewise ieee", seed], trials["standard", seed]
        assert ours["losses"] == pytest.approx(standard["losses"], abs=1e-5)
        assert len(ours["losses"]) == len(ours["seconds"]) == 3
        assert ours["end"]["validation"] == pytest.approx(standard["end"]["validation"], abs=1e-5)
        assert 0.0 < ours["end"]["attention_s"]
    assert trials["standard", 0]["losses"] != trials["standard", 1]["losses"]
    assert {"commit", "device", "versions"} <= set(summary["environment"])
    report.write(tmp_path / "results", tmp_path / "docs")
    page = (tmp_path / "docs/results/fp32.md").read_text()
    assert "No results file holds times of attention alone yet." in page
    assert "a training yet" not in page
    assert "### Training GPT-2 124M, 2 x 16 tokens" in page
    assert "reading t.bin, 2 seeds" in page
    assert "one rounding away" in page
    assert "| last loss, less standard attention's | seed 0 | seed 1 |" in page
    assert "| tilewise ieee |" in page
    assert "- Not trained: sdpa efficient: needs a GPU, this is a cpu" in page
    (drawn,) = (tmp_path / "docs/images").glob("*-training-0.png")
    assert f"images/{drawn.name}" in page
    assert picture.stat().st_size > 5000


def test_the_same_training_again_gives_the_same_losses():
    settings = replace(SMALL, steps=3, context=32, deterministic=True)
    try:
        runs = [[line["loss"] for line in train(settings, "tilewise") if "loss" in line] for _ in range(2)]
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # as the other tests want it
    assert runs[0] == runs[1]


def test_without_tokens_it_reads_bytes_in_order():
    pieces = list(islice(in_order(library_text(), 2, 16), 2))
    assert bytes(pieces[0][0].tolist()) == bytes(library_text()[:17].numpy())
    assert pieces[1][0, 0] == pieces[0][1, -1]


def test_a_training_that_fails_is_told_and_the_others_go_on(monkeypatch):
    def fail_at_first(settings, name, alone):
        assert alone
        yield {"loss": 5.0, "seconds": 0.1}
        if name == "standard":
            raise contest.TrainingError("out of memory. Tried to allocate 12 GiB. GPU 0 has 139 GiB")
        yield {"time_s": 0.1, "attention_s": 0.01, "peak_bytes": 1e9}

    monkeypatch.setattr(contest, "train_apart", fail_at_first)
    kept = []
    found = contest.contest(SMALL, ["standard", "tilewise ieee"], [0], lambda found: kept.append(len(found.trials)))
    assert kept == [1, 2]
    assert [trial.why for trial in found.trials] == ["out of memory", None]
    assert found.finished == ["tilewise ieee"]
    assert found.sentences() == []
    assert found.lines()[0][-2:] == ["-", "1.00"]


def test_a_contest_without_a_training_is_a_failure(tmp_path):
    result = gpt2("--attention=sdpa efficient", f"--results={tmp_path}", f"--plot={tmp_path / 't.png'}")
    assert result.exit_code == 1
    assert "not trained: sdpa efficient: needs a GPU" in result.stdout
    assert not (tmp_path / "t.png").exists()
    report.write(tmp_path, tmp_path / "docs")
    page = (tmp_path / "docs/results/fp32.md").read_text()
    assert "- Not trained: sdpa efficient" in page
    assert "training-0.png" not in page


def test_a_moved_model_is_one_rounding_away():
    def made():
        torch.manual_seed(0)
        return GPT(1, 2, 8, 16, lambda qkv: qkv[:, :, 0])

    model = made()
    move(model, seed=0)
    for weight, moved in zip(made().parameters(), model.parameters(), strict=True):
        up, down = (torch.nextafter(weight, torch.tensor(side)) for side in (torch.inf, -torch.inf))
        assert bool(((moved == up) | (moved == down)).all())
        assert weight.numel() < 100 or bool((moved == up).any() and (moved == down).any())


@pytest.mark.parametrize(("name", "seeds"), [("standard", []), ("standard moved", [3])])
def test_a_training_is_moved_by_its_name(monkeypatch, name, seeds):
    moved = []
    monkeypatch.setattr(trainer, "move", lambda model, seed: moved.append(seed))
    assert len(list(train(replace(SMALL, steps=1, seed=3), name))) == 2
    assert moved == seeds


def test_contests_are_told_in_numbers(tmp_path):
    def trial(name, seed, change, step_s):
        end = {"attention_s": 0.25 * step_s, "peak_bytes": 2e9, "time_s": 1.0}
        return Trial(name, seed, None, [5.0, 4.0 + seed, 3.0 + seed + change], [step_s] * 3, end)

    trials = [trial(n, s, c, t) for n, c, t in (("standard", 0.0, 0.2), ("tilewise tf32", 1e-3, 0.1)) for s in (0, 1)]
    found = Contest(asdict(SMALL), [*trials, Trial("tilewise fp16x3", 0, "not here")])
    assert found.finished == ["standard", "tilewise tf32"]
    assert found.lines()[1] == ["tilewise tf32", "3.5010", "-", "100.0", "25.0", "2.00", "2.00"]
    assert found.sentences() == [
        "tilewise tf32: losses differ from standard attention's by at most 1.0e-03 in the first 10 steps, 1.0e-03 in "
        "all, 1.0e-03 at the end.",
        "Seeds alone spread standard attention's last loss from 3.0000 to 4.0000.",
    ]
    assert found.by_seed() == [
        ["last loss, less standard attention's", "seed 0", "seed 1"], ["tilewise tf32", "+0.0010", "+0.0010"]
    ]  # fmt: skip
    assert found.reasons() == ["tilewise fp16x3: not here"]
    trainings.picture(found, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_contexts_stand_side_by_side(tmp_path):
    def run(context, names, batch=4):
        end = {"attention_s": 0.02, "peak_bytes": context * 1e6, "time_s": 1.0}
        trials = [Trial(name, 0, None, [5.0, 4.0], [0.1, 0.1], end) for name in names]
        return Contest(asdict(replace(SMALL, context=context, batch=batch)), trials)

    both, ours = ("standard", "tilewise bf16x6"), ("tilewise bf16x6",)
    (group,) = contexts.side_by_side([run(2048, both), run(8192, ours), run(1024, both), run(1024, both, batch=2)])
    head, *lines = contexts.table(group)
    assert head == ["", "attention", "1k", "2k", "8k"]
    assert lines[:2] == [
        ["ms a step", "standard", "100.0", "100.0", "-"], ["", "tilewise bf16x6", "100.0", "100.0", "100.0"]
    ]  # fmt: skip
    assert lines[-2:] == [
        ["peak GB", "standard", "1.02", "2.05", "-"], ["", "tilewise bf16x6", "1.02", "2.05", "8.19"]
    ]  # fmt: skip
    for c in group.values():
        trainings.save(tmp_path / "results/card/bench.json", "GPT", c, environment(torch.device("cpu")))
    report.write(tmp_path / "results", tmp_path / "docs")
    assert "### Training by context length, batch 4" in (tmp_path / "docs/results/fp32.md").read_text()
    assert (tmp_path / "docs/images/card-training-contexts-0.png").stat().st_size > 5000


def test_a_short_text_validates_fewer_rows_at_a_time(tmp_path):
    tokens, few = (token_file(tmp_path / f"{n}.bin", [n * i % 50257 for i in range(n)]) for n in (40, 20))
    result = gpt2(f"--tokens={tokens}", f"--validation={few}", "--attention=standard", f"--json={tmp_path / 't.json'}")
    assert result.exit_code == 0, result.output
    (trial,) = json.loads((tmp_path / "t.json").read_text())["trials"]
    assert 10.0 < trial["end"]["validation"] < 12.0  # log of the vocabulary


def test_a_contest_can_be_saved_in_parts(tmp_path):
    file, env = tmp_path / "card.json", environment(torch.device("cpu"))

    def rows_after(env, *names, **changes):
        settings = asdict(replace(SMALL, **changes))
        trials = [Trial(name, settings["seed"], None, [1.0], [1.0], {}) for name in names]
        trainings.save(file, "GPT", Contest(settings, trials), env)
        (run,) = load(file)[trainings.PART].values()
        return [(row["attention"], row["seed"]) for row in run["rows"]]

    assert rows_after(env, "standard") == [("standard", 0)]
    assert rows_after(env, "tilewise") == [("standard", 0), ("tilewise", 0)]
    assert rows_after(env, "tilewise", seed=1) == [("standard", 0), ("tilewise", 0), ("tilewise", 1)]
    assert rows_after(env, "standard") == [("tilewise", 0), ("tilewise", 1), ("standard", 0)]
    assert rows_after(env, "standard", steps=9) == [("standard", 0)]
    assert rows_after(env | {"kernels": "others"}, "tilewise", steps=9) == [("tilewise", 0)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model=gpt3"], "model must be one of small, gpt2-124m"),
        (["--precision=bf16"], "precision must be fp32"),
        (["--seeds=3"], "are for --model gpt2-124m"),
        (["--model=gpt2-124m", "--attention=mine"], "choose from standard, standard moved, sdpa efficient"),
        (["--matmul=low"], "matmul must be one of"),
    ],
)
def test_wrong_options_end_with_a_sentence(arguments, says):
    result = CliRunner().invoke(app, ["train", "--device=cpu", *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
    assert set(CONTENDERS) >= {"standard", "sdpa efficient", "tilewise fp16x3"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--steps 0", "steps must be above 0"),
        ("--width 100 --heads 3", "width must be heads times a head size"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, says):
    result = CliRunner().invoke(app, ["train", *arguments.split()])
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
