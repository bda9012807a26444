"""Where features meet: every pair of values of two features, in a call that equals the reference, or is refused.

    python -m pytest tests/features -k "cpu-017"

runs one case of the covering array; a failure tells its values. `refused.json` holds the pairs that are refused, each
with a pattern of the error, which must name both.
"""

import inspect
import json
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
import torch
from conformance import rule
from conformance.cases import Case, Draw

import tilewise as tw

from . import calls
from .cover import alone, cover, pairs
from .table import FEATURES, MASKS, NUMBER, TABLE, UNSAYABLE, by_convention, of_class, pair

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
REFUSED = {
    pair(*text.split(" & ")): pattern
    for text, pattern in json.loads((Path(__file__).parent / "refused.json").read_text()).items()
}
BARRED = UNSAYABLE | set(REFUSED)
CASES = cover(TABLE, BARRED)
ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)
NUMBERS = range(len(CASES))
THIRD = sorted(Random(0).sample(NUMBERS, len(CASES) // 3))
"""What Triton's interpreter, which is slow, runs."""
BACKENDS = {"hopper": NUMBERS, "triton": NUMBERS} if GPU else {"cpu": NUMBERS, "triton-interpreter": THIRD}


def told(chosen):
    """What a case has beside the defaults."""
    return ", ".join(f"{feature}: {name}" for feature, name in chosen.items() if name != TABLE[feature][0])


def suited(chosen, backend):
    """The case, with other values in place of those that a back end refuses, so that it runs all other pairs."""
    plain = {feature: names[0] for feature, names in TABLE.items()} | {"type": "bf16"}  # Hopper's is no fp32
    for feature in TABLE:
        against = calls.reasons(calls.prepare(chosen, DEVICE, None))[backend]
        other = chosen | {feature: plain[feature]}
        if not against:
            break
        if BARRED.isdisjoint(frozenset(two) for two in combinations(other.items(), 2)):
            fewer = calls.reasons(calls.prepare(other, DEVICE, None))[backend]
            chosen = other if len(fewer) < len(against) else chosen
    return chosen


@pytest.mark.parametrize(
    ("backend", "number"),
    [pytest.param(b, n, id=f"{b}-{n:03}") for b, numbers in BACKENDS.items() for n in numbers],
)
def test_as_the_reference(backend, number, record_property):
    name, chosen = backend.partition("-")[0], CASES[number]
    if name != "cpu":
        pytest.importorskip("triton", reason="Triton is not installed")
        chosen = suited(chosen, name)
    try:
        p = calls.prepare(chosen, DEVICE, name)
        if against := calls.reasons(p)[name]:
            assert name != "cpu", against
            pytest.skip("; ".join(against))
        before = {key: t.clone() for key, t in p.leaves.items()}
        true, allowed = calls.expected(p)
        got = calls.run(p)
        assert {key: t.dtype for key, t in got.items()} == {key: t for key, t in calls.types(p).items() if key in true}
        rule.assert_as_accurate_as_torch(got, true, allowed, p.case.precision)
        for key, t in p.leaves.items():
            assert torch.equal(t.float().nan_to_num(7.0), before[key].float().nan_to_num(7.0)), f"{key} was written"
    except (AssertionError, *ERRORS) as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nin the case {told(chosen)}") from error
    record_property("pairs", [name, sorted(chosen.items())])


@pytest.mark.parametrize("refused", [pytest.param(one, id=" & ".join(map(": ".join, sorted(one)))) for one in REFUSED])
def test_refused_by_name(refused, record_property):
    p = calls.prepare(alone(refused, TABLE, BARRED), "cpu", None)
    before = {key: t.clone() for key, t in p.leaves.items()}
    with pytest.raises(ERRORS, match=REFUSED[refused]) as caught:
        calls.run(p)
    for feature, name in refused:
        words = FEATURES[feature][name].words or feature
        assert re.search(words, str(caught.value)), f"{feature}: {name} ({words}) is not named: {caught.value}"
    for key, t in p.leaves.items():
        assert torch.equal(t.float().nan_to_num(7.0), before[key].float().nan_to_num(7.0)), f"{key} was written"
    record_property("pairs", ["refused", sorted(refused)])


def test_no_pair_is_left(record_property):
    every = set(pairs(TABLE)) - UNSAYABLE
    covered = {frozenset(two) for case in CASES for two in combinations(case.items(), 2)}
    assert BARRED.isdisjoint(covered)
    assert every - covered == set(REFUSED)
    assert CASES == cover(TABLE, BARRED), "the list differs from process to process"
    record_property("pairs", ["all", len(every)])


RESULTS = {tw.Calls, tw.Explanation, tw.Unsupported, tw.Warmed}
"""Exported classes that no call is given."""


def test_every_argument_and_every_exported_class_is_in_the_table():
    arguments, classes, defaults = {"q", "k", "v", "backend"}, set(), inspect.signature(tw.attention).parameters
    for feature, names in TABLE.items():
        for name in names:
            p = calls.prepare(alone({(feature, name)}, TABLE, BARRED), "cpu", None)
            own, given = calls.arguments(p, p.options, tuple(p.leaves.values()))
            given["return_lse"] = p.case.loss != "o"
            arguments |= {key for key, value in given.items() if value is not defaults[key].default}
            values = [*own, *given["mask"].parts, *given["score"], *given.values()]
            classes |= {base for value in values for base in type(value).__mro__}
    assert arguments == set(defaults)
    exported = {one for name in tw.__all__ if inspect.isclass(one := getattr(tw, name))}
    lacking = [one.__name__ for one in exported - RESULTS - classes - {tw.Full}]
    assert not lacking, f"no case of tests/features/table.py has {lacking}"


@dataclass(frozen=True, eq=False)
class Even(tw.Mask):
    """A class that nobody has told the table about."""

    first: int
    ids: torch.Tensor
    captures = ("ids",)
    shapes = ("BN",)

    def __post_init__(self):
        if self.ids.dtype != torch.int64:
            raise TypeError(self.ids.dtype)


class Odd(Even):
    def __post_init__(self):
        raise ValueError


def test_a_new_class_joins_by_itself(monkeypatch):
    monkeypatch.setattr(tw, "Even", Even, raising=False)
    monkeypatch.setattr(tw, "__all__", [*tw.__all__, "Even"])
    (build,) = [build for name, build, kind in of_class(MASKS, tw.Mask) if name == "Even"]
    made = build(Draw(Case("even"), "cpu"))
    assert made.first == NUMBER
    assert made.ids.shape == (2, 53)
    with pytest.raises(AssertionError, match="no builder for Odd"):
        by_convention(Odd)(Draw(Case("odd"), "cpu"))
