"""docs/use/many-gpus.md: its table is what the model says, and its picture's numbers follow from masks."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from studies.bench.results import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "pictures"))
parallel = pytest.importorskip("parallel")
PAGE = (DOCS / "use" / "many-gpus.md").read_text()


@pytest.mark.parametrize("name", ["table", "memory"])
def test_the_tables_are_the_models(name):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert found, "the page has lost its markers"
    assert found[1] == getattr(parallel, name)(), "run python docs/pictures/parallel.py and put its lines there"
    assert "No machine has measured these numbers." in PAGE


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/parallel-x[2-8].json")), ids=lambda file: file.parent.name)
def test_ranks_hold_what_the_page_says(file):
    """Memory of rows that were measured, beside the share's, is at most the model's."""
    rows = [row for row in json.loads(file.read_text()) if row["gpus"] > 1]
    assert rows
    for row in rows:
        sizes = parallel.Sizes(row["tokens"], row["gpus"], *row["heads"], 128)
        assert row["peak_bytes"] - row["peak_bytes_of_share"] <= 1.01 * parallel.cost(row["plan"], 1, sizes).memory, row


def test_the_picture_shows_three_quarters_neighbours_and_everyone():
    drawn = parallel.cases()
    assert float(drawn["ring, Zigzag, causal"].sum()) / parallel.RANKS == pytest.approx(0.75 * 7, rel=0.01)
    window = drawn["ring, Contiguous, window"]
    assert set(map(tuple, window.nonzero().tolist())) == {(r, r - 1) for r in range(1, parallel.RANKS)}
    assert torch.equal(drawn["gather, any mask"].diagonal(), torch.zeros(parallel.RANKS))
