"""docs/use/many-gpus.md: its table is what the model says, and its picture's numbers follow from masks."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import tilewise.parallel as tp
from studies.bench import parallel as bench
from studies.bench.results import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "pictures"))
parallel = pytest.importorskip("parallel")
PAGE = (DOCS / "use" / "many-gpus.md").read_text()


@pytest.mark.parametrize(("name", "made"), [("table", "table"), ("memory", "memory"), ("two", "measured")])
def test_the_tables_are_the_models_and_what_was_measured(name, made):
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert found, "the page has lost its markers"
    assert found[1] == getattr(parallel, made)(), "run python docs/pictures/parallel.py and put its lines there"
    assert "No machine has measured these numbers." in PAGE


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/parallel-x[2-8].json")), ids=lambda file: file.parent.name)
def test_ranks_hold_what_the_page_says(file):
    """Memory of rows that were measured, beside the share's, is at most the model's."""
    rows = [row for row in json.loads(file.read_text()) if row["gpus"] > 1]
    assert rows
    for row in rows:
        sizes = parallel.Sizes(row["tokens"], row["gpus"], *row["heads"], 128)
        assert row["peak_bytes"] - row["peak_bytes_of_share"] <= 1.01 * parallel.cost(row["plan"], 1, sizes).memory, row


MEASURED = [file for file in sorted(RESULTS.glob("*/parallel-x[2-8].json")) if '"by_default"' in file.read_text()]


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.parent.name)
def test_the_plan_that_is_chosen_is_within_3_percent_of_the_best(file):
    """Of the plans that were measured on the same sharding, by the model without TILEWISE_CLUSTER."""
    rows = bench.alike(json.loads(file.read_text()), "mask", "sharding", "tokens", "heads", "gpus")
    assert rows
    for (mask, sharding, tokens, heads, gpus), some in rows.items():
        known = {row["plan"]: row["milliseconds"] for row in some}
        dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
        try:
            whole, group = bench.mask_of(mask, tokens), dist.group.WORLD
            s = bench.balanced(group, whole, tokens) if sharding == "Balanced" else getattr(tp, sharding)(group)
            one = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
            own = [one.expand(1, len(s.positions(tokens)), count, 128) for count in (*heads, heads[1])]
            found = tp.explain(*own, sharding=s, mask=whole)
        finally:
            dist.destroy_process_group()
        chosen = min((found.costs[plan].seconds, plan) for plan in known)[1]
        assert known[chosen] <= min(known.values()) / bench.DEFAULT, (mask, sharding, tokens, chosen, known)


def test_the_picture_shows_three_quarters_neighbours_and_everyone():
    drawn = parallel.cases()
    assert float(drawn["ring, Zigzag, causal"].sum()) / parallel.RANKS == pytest.approx(0.75 * 7, rel=0.01)
    window = drawn["ring, Contiguous, window"]
    assert set(map(tuple, window.nonzero().tolist())) == {(r, r - 1) for r in range(1, parallel.RANKS)}
    assert torch.equal(drawn["gather, any mask"].diagonal(), torch.zeros(parallel.RANKS))
