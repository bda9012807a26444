"""The small GPT: one seed gives one training, whichever attention it uses."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from tilewise.bench.results import Row, environment
from tilewise.bench.suites import BOTH, SUITES
from tilewise.cli.app import app
from tilewise.cli.gpt import GPT, batches, library_text
from tilewise.cli.page import write_page
from tilewise.cli.pictures import training
from tilewise.cli.train import Comparison
from tilewise.cli.trainer import ATTENTION, Settings

SMALL = Settings(steps=4, context=64, batch=2, layers=2, heads=2, width=32)


def comparison(difference=0.0):
    losses = [5.0, 4.0, 3.0]
    return Comparison(
        SMALL, "cpu", {"standard": losses, "tilewise": [*losses[:2], 3.0 + difference]},
        {"standard": 2.0, "tilewise": 1.0}, {"standard": 400_000_000, "tilewise": 100_000_000},
    )  # fmt: skip


def test_both_attentions_give_the_same_loss_and_gradients():
    data = next(batches(library_text(), SMALL.batch, SMALL.context, seed=0))
    found = {}
    for name in ATTENTION:
        torch.manual_seed(0)
        model = GPT(SMALL.layers, SMALL.heads, SMALL.width, SMALL.context, ATTENTION[name])
        loss = model.loss(data)
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found["tilewise"], found["standard"])


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
    options = [f"--{name}={value}" for name, value in asdict(SMALL).items() if name not in ("device", "learning_rate")]
    file, picture = tmp_path / "t.json", tmp_path / "t.png"
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
    result = CliRunner().invoke(app, ["train", "--device=cpu", "--steps=1", "--context=100000000"])
    assert result.exit_code == 1
    assert "The training with standard attention failed" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("change", [{"steps": 0}, {"width": 33}, {"width": 1024, "heads": 2}, {"learning_rate": -1.0}])
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
