"""examples/change_attention.py: the model learns, and the bias is what it learns the words before by."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "change_attention.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("change_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_seed():
    with torch.random.fork_rng():
        yield


def test_the_loss_falls(example, capsys):
    first, last, right = example.train(biased=True, steps=45)
    said = capsys.readouterr().out
    assert last < 0.5 * first
    assert 0.3 < right <= 1.0
    assert re.findall(r"step +(\d+) loss", said) == ["0", "25", "44"]
    bias = [float(x) for x in said.split("distance:")[1].split()]
    assert len(bias) == example.WINDOW + 1
    assert max(bias) == bias[example.BACK] > 0


def test_a_run_repeats(example):
    assert example.train(biased=True, steps=3) == example.train(biased=True, steps=3)


def test_labels_are_seen_by_their_rows(example):
    """The mask shows every word what its label is."""
    tokens, labels, first = example.batch(torch.Generator().manual_seed(0))
    mask = example.tw.Mask.of(example.near_or_title, first)
    seen = mask.dense(example.LENGTH, example.LENGTH, example.BATCH)[:, 0]
    b, i = (labels >= 0).nonzero().T
    small = tokens[b, i] < example.WORDS // 2
    j = torch.where(small, i - example.BACK, first[b, i])
    assert seen[b, i, j].all()
    assert torch.equal(tokens[b, j] % example.WORDS, labels[b, i])
    assert seen.sum(-1).max() == example.WINDOW + 1


def test_it_runs_as_its_first_lines_say(example, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--steps", "2"])
    example.main()
    found = re.findall(r"loss \S+ to \S+, (\d+)% of the labels right", capsys.readouterr().out)
    assert len(found) == 2
