"""Counts the pairs of features that a run has covered, over all of pytest's workers, and prints them at its end."""

from itertools import combinations

PAIRS: dict[str, set[frozenset[tuple[str, str]]]] = {}
"""Those of the cases that passed, by back end; and those that were refused."""
COUNT = []
"""How many there are."""


def pytest_runtest_logreport(report):
    told = dict(report.user_properties).get("pairs")
    if told is None or report.when != "call" or report.outcome != "passed":
        return
    where, values = told
    if where == "all":
        COUNT.append(values)
    else:
        PAIRS.setdefault(where, set()).update(frozenset(two) for two in combinations(map(tuple, values), 2))


def pytest_terminal_summary(terminalreporter):
    refused = len(PAIRS.pop("refused", ()))
    for backend, seen in PAIRS.items():
        left = f", {COUNT[0] - refused - len(seen)} left" if COUNT else ""
        terminalreporter.write_line(f"pairs of features, {backend}: {len(seen)} covered, {refused} refused{left}")
