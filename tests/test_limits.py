"""The structure stays within its limits (tools/limits.py), which may fall, and rise only with an ADR."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "limits.py"
spec = importlib.util.spec_from_file_location("limits", FILE)
limits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(limits)


@pytest.mark.parametrize("count", limits.counts(), ids=lambda count: count.what)
def test_no_count_exceeds_its_limit(count):
    assert count.found <= count.limit, f"write an ADR, or find another way: {count.where}"
    assert count.aim is None or count.aim <= count.limit


def test_a_limit_falls_with_what_it_limits():
    """Where we aim at less, today's count is the limit."""
    for count in limits.counts():
        assert count.aim is None or count.limit - count.found <= 0.01 * count.limit, f"lower the limit of {count.what}"


def test_floors_are_counted_by_the_longest_way_down():
    above = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "x": {"y"}, "y": {"x", "b"}}
    assert limits.floors(above) == {"a": 3, "b": 2, "c": 1, "x": 3, "y": 3}
    assert limits.circles(above) == ["x -> y", "y -> x"]


def test_questions_are_found_wherever_a_test_stands(tmp_path):
    file = tmp_path / "asks.py"
    file.write_text(
        "def f(p, ts):\n"
        "    if p.varlen:\n        pass\n"
        "    x = 1 if p.layout is None else 2\n"
        "    y = [t for t in ts if t.layout]\n"
        "    z = p.varlen and p.M\n"
        "    w = 3 if t.layout is torch.strided else 4\n"
        "    return p.layout.pages == 2\n"
    )
    limits.PACKAGE, before = tmp_path, limits.PACKAGE
    try:
        assert len(limits.asked([file], limits.LAYOUT)) == 5
    finally:
        limits.PACKAGE = before
