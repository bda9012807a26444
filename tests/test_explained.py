"""What `explain` says of forty calls, word by word. If a change is meant: python tests/explained.py."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from explained import FILE, calls, explained


def test_every_explanation_is_as_kept():
    found, kept = explained().split("\n\n"), FILE.read_text().split("\n\n")
    assert len(kept) >= 40
    assert found == kept


def test_each_call_is_explained_once():
    names = [name for name, *_ in calls()]
    assert len(set(names)) == len(names)
