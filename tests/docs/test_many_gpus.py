"""docs/use/many-gpus.md: its table is what the model says, and its picture's numbers follow from masks."""

import re
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "pictures"))
parallel = pytest.importorskip("parallel")
PAGE = (DOCS / "use" / "many-gpus.md").read_text()


def test_the_table_is_the_models():
    found = re.search(r"<!-- table -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert found, "the page has lost its markers"
    assert found[1] == parallel.table(), "run python docs/pictures/parallel.py and put its lines there"
    assert "No machine has measured these numbers." in PAGE


def test_the_picture_shows_three_quarters_neighbours_and_everyone():
    drawn = parallel.cases()
    assert float(drawn["ring, Zigzag, causal"].sum()) / parallel.RANKS == pytest.approx(0.75 * 7, rel=0.01)
    window = drawn["ring, Contiguous, window"]
    assert set(map(tuple, window.nonzero().tolist())) == {(r, r - 1) for r in range(1, parallel.RANKS)}
    assert torch.equal(drawn["gather, any mask"].diagonal(), torch.zeros(parallel.RANKS))
