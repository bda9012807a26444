"""What `explain` says of some fifty calls, word by word. If a change is meant: python tests/explained.py."""

import importlib
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
import torch
from explained import FILE, calls, calls_of_functions, explained

import tilewise as tw

explain = importlib.import_module("tilewise.attention.explain")


def test_every_explanation_is_as_kept():
    found, kept = explained().split("\n\n"), FILE.read_text().split("\n\n")
    assert len(kept) >= 40
    assert found == kept


def test_each_call_is_explained_once():
    names = [name for name, *_ in calls()]
    assert len(set(names)) == len(names)


def counted(line):
    """How many tiles of how many are skipped, masked and whole."""
    skipped, count, masked, whole = map(
        int, re.search(r"(\d+) of (\d+) .*?(\d+) masked, .*?(\d+) whole", line).groups()
    )
    assert skipped + masked + whole == count
    return skipped, masked, whole


@pytest.mark.parametrize(("x", "options"), [call[1:] for call in calls_of_functions() if "mask" in call[2]])
def test_tiles_of_functions_are_counted(x, options, monkeypatch):
    *_, exact = tw.explain(*x, **options).functions
    seen = (tw.Full() & options["mask"]).dense(x[0].shape[1], x[1].shape[1], 2, 4).float()[None]
    seen = seen.flatten(0, -3)  # (B or 1, M, N)
    some, less = [torch.nn.functional.max_pool2d(t, explain.SIDE, ceil_mode=True).bool() for t in (seen, 1.0 - seen)]
    assert counted(exact) == tuple([int(t.sum()) for t in (~some, some & less, ~less)])
    monkeypatch.setattr(explain, "MOST_ENTRIES", -1)
    *_, bounded = tw.explain(*x, **options).functions
    assert "at least" in bounded
    assert counted(bounded)[0] <= counted(exact)[0]
    assert counted(bounded)[2] <= counted(exact)[2]


def test_nothing_is_counted_where_lengths_differ_or_tiles_are_too_many(monkeypatch):
    def near(b, h, i, j):
        return i - j < 4

    x = torch.zeros(1, 256, 2, 8)
    cu = torch.tensor([0, 56, 256], dtype=torch.int32)
    assert len(tw.explain(x, x, x, mask=near).functions) == 2
    packed = tw.explain(*[x[0]] * 3, mask=near, layout=tw.Varlen(cu, cu))
    assert len(packed.functions) == 1
    monkeypatch.setattr(explain, "MOST_TILES", 7)
    assert len(tw.explain(x, x, x, mask=near).functions) == 1
    assert tw.explain(x, x, x, mask=tw.Causal()).functions == ()
