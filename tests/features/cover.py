"""A covering array: few cases, in which every pair of values of two features occurs."""

from collections.abc import Mapping, Sequence, Set
from itertools import combinations, product
from random import Random

Value = tuple[str, str]
"""A feature, and one of its values."""
Pair = frozenset[Value]
Table = Mapping[str, Sequence[str]]
"""The names of each feature's values; the first is its default."""


def pairs(table: Table) -> list[Pair]:
    """Return all pairs of values of two features."""
    values = {feature: [(feature, name) for name in names] for feature, names in table.items()}
    return [frozenset(pair) for one, other in combinations(values, 2) for pair in product(values[one], values[other])]


def filled(
    chosen: Set[Value], order: Sequence[str], table: Table, barred: Set[Pair], gains: Mapping[Value, set[Value]]
) -> set[Value] | None:
    """Give every other feature the value that is in most of the pairs left, and in no barred one; None if none is."""
    case = set(chosen)
    for feature in order:
        if feature not in {known for known, _ in case}:
            values = [(feature, name) for name in table[feature]]
            able = [value for value in values if not any(frozenset((value, other)) in barred for other in case)]
            if not able:
                return None
            case.add(max(able, key=lambda value: len(gains[value] & case)))
    return case


def cover(table: Table, barred: Set[Pair] = frozenset(), seed: int = 0, tries: int = 5) -> list[dict[str, str]]:
    """Return cases that have every pair but the barred ones, and none of these; the same ones in every process."""
    draw, todo = Random(seed), [pair for pair in pairs(table) if pair not in barred]
    gains: dict[Value, set[Value]] = {(feature, name): set() for feature, names in table.items() for name in names}
    for one, other in todo:
        gains[one].add(other)
        gains[other].add(one)
    cases = []
    for pair in todo:
        one, other = sorted(pair)
        while other in gains[one]:
            orders = [draw.sample(list(table), len(table)) for _ in range(tries)]
            found = [case for order in orders if (case := filled(pair, order, table, barred, gains))]
            best = max(found, key=lambda case: sum(len(gains[value] & case) for value in case))
            cases.append({feature: dict(best)[feature] for feature in table})
            for value in best:
                gains[value] -= best
    return cases


def alone(pair: Set[Value], table: Table, barred: Set[Pair]) -> dict[str, str]:
    """Return the case that has this pair, and of every other feature the first value that nothing bars."""
    case = filled(pair, list(table), table, barred, {(f, name): set() for f, names in table.items() for name in names})
    assert case is not None, f"no other values go with {sorted(pair)}"
    return {feature: dict(case)[feature] for feature in table}
