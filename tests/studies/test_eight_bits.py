"""The study of 8 bits: its schemes err in the order that the page tells."""

import pytest
import torch
from typer.testing import CliRunner

from studies.app import app
from studies.eight_bits import command
from studies.eight_bits.schemes import by_length, draw, errors, gradient_errors
from studies.eight_bits.training import compared, trainings
from studies.training.trainer import Settings


def test_schemes_err_in_the_order_of_the_page():
    found = {name: error for name, error, _ in errors("paper", 1024, 128, seeds=1)}
    one, fa3 = found["e4m3, one scale a tensor"], found["e4m3, rotated, blocks: FlashAttention-3"]
    fp8, int8, fp16 = found['tilewise "fp8"'], found['tilewise "int8"'], found["tilewise, fp16"]
    assert one > fa3 > fp8 > int8 > fp16


def test_o_keeps_its_length():
    (_, short), (_, long) = by_length([512, 16384])
    for of in (short, long):
        assert all(abs(of[name] - 1) < 2e-3 for name in ("fp8", "int8"))
    assert long["in one sum"] < 0.99 < short["in one sum"]


def test_the_original_tensors_have_wrong_gradients_where_channels_differ():
    found = dict(gradient_errors("channels", rows=256))
    for precision in ("int8", "fp8"):
        assert found[precision][0] < found[f"{precision}, then bf16 of the original tensors"][0]


def test_an_unknown_draw_is_told():
    with pytest.raises(ValueError, match="draw must be normal, paper, outliers, sink or channels, got 'other'"):
        draw("other", 8, 64, 0)


def test_a_sink_takes_about_half_of_a_row():
    q, k, _ = draw("sink", 256, 64, 0)
    share = torch.softmax(q @ k.mT / 8, -1)[:, 0].mean()
    assert 0.2 < share < 0.8


def test_one_gpt_trains_alike_in_every_precision():
    settings = Settings(steps=3, context=64, batch=2, layers=1, heads=2, width=32)
    found = list(trainings(settings))
    lines = compared(found)
    assert [name for name, *_ in lines] == ["fp32", "fp32, moved", "bf16", "int8", "fp8"]
    for name, losses in found:
        assert len(losses) == 3
        assert all(abs(a - b) < 0.02 for a, b in zip(losses, found[0][1], strict=True)), name
    assert found[0][1] != found[2][1] != found[3][1] != found[4][1]


def test_the_command_prints_its_tables(monkeypatch):
    monkeypatch.setitem(command.MODELS, "small", lambda device: Settings(2, 64, 2, 1, 2, 32))
    told = CliRunner().invoke(app, ["eight_bits", "--rows", "256", "--longest", "4096"])
    assert told.exit_code == 0, told.output
    assert told.output.count("| tilewise") == 4
    assert told.output.count("then bf16 of the original tensors") == 10
    assert "| fp8 |" in told.output.split("A GPT of")[1]
    told = CliRunner().invoke(app, ["eight_bits", "--table", "lengths", "--longest", "4096"])
    assert "Gradients" not in told.output
    told = CliRunner().invoke(app, ["eight_bits", "--table", "speed"])
    assert told.exit_code != 0
    words = " ".join(told.output.replace("│", " ").split())
    assert "table must be one of errors, lengths, gradients, training, got 'speed'" in words
