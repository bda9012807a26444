"""The study of 8 bits: its schemes err in the order that the page tells."""

import pytest
from typer.testing import CliRunner

from studies.app import app
from studies.eight_bits.schemes import by_length, draw, errors, gradient_errors


def test_schemes_err_in_the_order_of_the_page():
    found = {name: error for name, error, _ in errors("paper", 1024, 128, seeds=1)}
    one, fa3 = found["e4m3, one scale a tensor"], found["e4m3, rotated, blocks: FlashAttention-3"]
    fp8, int8, fp16 = found['tilewise "fp8"'], found['tilewise "int8"'], found["tilewise, fp16"]
    assert one > fa3 > fp8 > int8 > fp16


def test_o_keeps_its_length():
    for _, of in by_length([512]):
        assert all(abs(x - 1) < 2e-3 for x in of.values())


def test_the_original_tensors_have_wrong_gradients_where_channels_differ():
    found = dict(gradient_errors("channels", rows=256))
    for precision in ("int8", "fp8"):
        assert found[precision][0] < found[f"{precision}, then bf16 of the original tensors"][0]


def test_an_unknown_draw_is_told():
    with pytest.raises(ValueError, match="draw must be normal, paper or channels, got 'other'"):
        draw("other", 8, 64, 0)


def test_the_command_prints_its_tables():
    told = CliRunner().invoke(app, ["eight_bits", "--rows", "256", "--longest", "4096"])
    assert told.exit_code == 0, told.output
    assert told.output.count("| tilewise") == 4
    assert told.output.count("then bf16 of the original tensors") == 6
