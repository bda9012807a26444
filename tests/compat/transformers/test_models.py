"""Fifteen kinds of models, each in five ways, give what eager attention gives."""

import pytest
import torch
from compat.transformers.models import CAUSAL, GENERATE, OTHERS, difference, forward, generate, inputs, make

LARGEST = {"gemma4": 5e-5}
"""Differences above 1e-5: over head size 512, unscaled, eager attention errs by 3e-5 itself."""
COLUMNS = ("right", "left", "packed", "dynamic", "static")
CELLS = [
    (name, column)
    for name in (*CAUSAL, *OTHERS)
    for column in COLUMNS
    if {"packed": name in CAUSAL, "dynamic": name in GENERATE, "static": name in GENERATE}.get(column, True)
]


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_a_model_gives_what_eager_gives(name, column):
    model = make(name)

    def run():
        if column in ("dynamic", "static"):
            return generate(model, inputs(name, "left"), "static" if column == "static" else None)
        return forward(model, inputs(name, column))

    wanted = run()
    model.set_attn_implementation("tilewise")
    got = run()
    assert len(got) == len(wanted)
    if column in ("dynamic", "static"):
        assert torch.equal(got[0], wanted[0])
    else:
        assert difference(got, wanted) < LARGEST.get(name, 1e-5)
