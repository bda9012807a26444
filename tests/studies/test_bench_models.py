"""studies/bench/models.py: models make their steps, who is wrong is not timed, a later run goes on, bars are judged."""

import json
import math
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.modeling_utils import AttentionInterface  # noqa: E402

from studies.app import app  # noqa: E402
from studies.bench import command, models, results  # noqa: E402
from studies.bench.models import COMPILED, EAGER, MODES, OFF_LOSS, OFF_NORM, Contender, Step, differences  # noqa: E402
from studies.bench.steps import MODELS, STANDARD  # noqa: E402
from tilewise.compat.transformers import install, uninstall  # noqa: E402

CPU = torch.device("cpu")
NAME = "BERT-large"


@pytest.fixture
def in_this_process():
    """What a step changes in its process is undone."""
    install()
    with torch.compiler.config.patch(cache_key_tag=""):
        yield
    uninstall()


def content(folder):
    (file,) = folder.glob("*/models.json")
    return results.unpacked(json.loads(file.read_text()))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The arguments of a rehearsal with few contenders, its folder and what its file holds."""
    folder = tmp_path_factory.mktemp("results")
    arguments = ["--device", "cpu", "--quick", "--results", str(folder), "--model", NAME]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, NAME, replace(MODELS[NAME], peers=("sdpa",)))
        assert models.main(arguments) == 0
    return Namespace(arguments=arguments, folder=folder, content=content(folder))


def test_each_row_has_times_and_losses(rehearsed):
    rows = rehearsed.content["rows"]
    assert [(row["model"], row["mode"]) for row in rows] == [(NAME, EAGER), (NAME, COMPILED)]
    for row in rows:
        assert row["milliseconds"].keys() == row["tokens"].keys() == row["losses"].keys() == {"tilewise", "sdpa"}
        assert row["why"] == {}
        assert row["ratio"] == pytest.approx(row["milliseconds"]["sdpa"] / row["milliseconds"]["tilewise"], rel=1e-4)
        assert row["off"]["tilewise"]["norms"] < OFF_NORM / 2


def test_a_later_run_measures_nothing_again_unless_programs_have_changed(rehearsed, monkeypatch):
    monkeypatch.setattr(models, "Contest", lambda *given: pytest.fail("it measures again"))
    assert models.main(rehearsed.arguments) == 0
    assert content(rehearsed.folder) == rehearsed.content
    (file,) = rehearsed.folder.glob("*/models.json")
    env = rehearsed.content["environment"]
    assert models.saved(file, env) == rehearsed.content["rows"]
    assert models.saved(file, env | {"clients": {}}) == []


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.client == "transformers"])
def test_a_step_on_tilewise_has_the_loss_and_gradients_of_pytorch(name, in_this_process):
    if name == "T5-base" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
        pytest.skip("before transformers 5.20 it has attention of its own")
    peer = STANDARD if STANDARD in MODELS[name].peers else "sdpa"
    found, true = (Step(MODELS[name], each, CPU, True).check(EAGER) for each in ("tilewise", peer))
    off = differences(found, true)
    assert off["loss"] < OFF_LOSS / 2
    assert off["norms"] < OFF_NORM / 2


def test_attention_without_its_mask_is_seen(in_this_process, monkeypatch):
    right = Step(MODELS["GPT-2 124M"], "sdpa", CPU, True).check(EAGER)
    of = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "sdpa",
        lambda module, *x, **options: of(module, *x[:3], None, **{**options, "is_causal": False}),
    )  # fmt: skip
    wrong = Step(MODELS["GPT-2 124M"], "sdpa", CPU, True).check(EAGER)
    assert differences(wrong, right)["norms"] > OFF_NORM
    assert differences({**right, "loss": math.nan}, right) == {"loss": math.inf, "norms": math.inf}


def test_a_step_that_does_not_reach_tilewise_is_refused(in_this_process):
    step = Step(MODELS[NAME], "tilewise", CPU, True)
    step.module.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="no call of attention came to tilewise"):
        step.check(EAGER)


def test_what_a_contender_lacks_is_its_answer(in_this_process):
    asked = [("check", EAGER), ("sample", EAGER, 0.0, 0.0), None]
    answers = []
    pipe = Namespace(recv=lambda: asked.pop(0), send=answers.append)
    models.serve(pipe, NAME, "sdpa cudnn", CPU, True)
    assert answers == [(None, "PyTorch has no such kernel for this call")] * 2


def test_who_takes_too_long_is_cut_off():
    contender = Contender("GPT-2 124M", "sdpa", CPU, True)
    contender.ask("check", EAGER)
    began = time.monotonic()
    assert contender.answer(0.0) == (None, "it was cut off after its time limit")
    contender.process.join(20)
    assert contender.answer(60.0) == (None, "its process died")
    contender.ask("check", EAGER)
    contender.end()
    assert time.monotonic() - began < 20


def test_a_model_that_is_not_here_is_skipped_with_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(models, "missing", lambda model: "nobody is installed")
    assert models.main(["--device", "cpu", "--quick", "--model", "Swin-T"]) == 0
    said, *_, eager, compiled = capsys.readouterr().out.splitlines()
    assert said.startswith("Swin-T, , eager")
    assert said.endswith("not measured: Swin-T: nobody is installed")
    assert (eager, compiled) == ("eager: 0 of 0 bars hold", "compiled: 0 of 0 bars hold")


def test_the_table_judges_each_mode_by_itself():
    times = {EAGER: {"tilewise": 2.0, "sdpa": 3.0, "flex": 2.5}, COMPILED: {"tilewise": 2.0, "sdpa": 1.0}}
    rows = [
        {"model": "a", "size": "1 x 2", "mode": mode, "milliseconds": times[mode], "why": {},
         "tokens": {"tilewise": 9e3}, **models.judged(times[mode])}
        for mode in MODES
    ]  # fmt: skip
    eager, compiled, *bars = models.table(rows)
    assert "1.250 of flex, at least 1.0: holds; 9k tokens/s; tilewise 2.00 ms" in eager
    assert "0.500 of sdpa, at least 1.0: MISSED" in compiled
    assert bars == ["eager: 1 of 1 bars hold", "compiled: 0 of 1 bars hold"]
    assert models.judged({"sdpa": 1.0}) == {"than": "sdpa", "ratio": None}


def test_the_suite_is_a_command(monkeypatch):
    given = []
    monkeypatch.setattr(command.models, "main", lambda arguments: given.append(arguments) or 0)
    options = ["bench", "--suite", "models", "--device", "cpu", "--quick"]
    assert CliRunner().invoke(app, [*options, "--match", "Llama-8B", "--results", "there"]).exit_code == 0
    names = ["--model", "Llama-8B layer, 8k", "--model", "Llama-8B layer, 32k"]
    assert given == [[*names, "--device", "cpu", "--quick", "--results", "there"]]
    for more in (["--suite", "short"], ["--peer", "flex"], ["--match", "Mamba"]):
        result = CliRunner().invoke(app, [*options, *more])
        assert (result.exit_code, len(given)) == (2, 1)
        assert more[-1 if more[0] != "--peer" else 0] in result.output


def test_a_cpu_rehearses_small_models_alone(capsys):
    with pytest.raises(SystemExit):
        models.main(["--device", "cpu"])
    assert "pass --quick" in capsys.readouterr().err
