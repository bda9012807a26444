"""What pytest does under `make card` (-p card_plugin): leaves out tests that have an outcome, writes others at once.

TILEWISE_CARD holds the step, the file to write to, and the tests to leave out.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

PLAN = "TILEWISE_CARD"
LONGEST = 2000
"""Characters of a failure's end."""


def append(path: Path, line: dict[str, Any]) -> None:
    """Append one line, whole even if others write at the same time."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file: the last one may have been cut off."""
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(text)


@lru_cache
def _text(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def digest(root: Path, name: str) -> str:
    """Hash a test's name and the text of its file, so that it runs again when its file changes."""
    return hashlib.sha256(name.encode() + _text(root / name.split("::", maxsplit=1)[0])).hexdigest()[:8]


def unfinished(path: Path, step: str, state: str) -> list[str]:
    """Return the tests of a step that have begun and not ended, by the file's last lines."""
    begun: dict[str, None] = {}
    for line in lines(path):
        if (line["step"], line["state"]) == (step, state):
            if line.get("event") == "test":
                begun[line["name"]] = None
            elif "test" in line:
                begun.pop(line["test"], None)
    return list(begun)


class Keeper:
    """Write outcomes, in the process that reports. Under xdist that one runs no tests."""

    def __init__(self, config: pytest.Config, plan: dict[str, Any]) -> None:
        self.root, self.plan = config.rootpath, plan

    def write(self, **line: Any) -> None:
        """Write a line of this step."""
        append(Path(self.plan["log"]), {"step": self.plan["step"], "state": self.plan["state"], **line})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test begins, in case it never ends."""
        self.write(event="test", name=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write that a call passed, or that a setup, call or teardown did not."""
        if report.when == "call" or report.outcome != "passed":
            self._outcome(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write that a file cannot be collected."""
        if report.failed:
            self._outcome(report.nodeid, "failed", report)

    def _outcome(self, name: str, outcome: str, report: Any) -> None:
        why = report.longreprtext[-LONGEST:] if outcome == "failed" else ""
        self.write(test=name, digest=digest(self.root, name), outcome=outcome, why=why)


class Runner:
    """Choose the tests to run, in a process that runs them."""

    def __init__(self, config: pytest.Config, plan: dict[str, Any]) -> None:
        self.root, self.done, self.failed = config.rootpath, set(plan["done"]), set(plan["failed"])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that have an outcome."""
        left: list[pytest.Item] = []
        out: list[pytest.Item] = []
        for item in items:
            done = item.nodeid in self.failed or digest(self.root, item.nodeid) in self.done
            (out if done else left).append(item)
        config.hook.pytest_deselected(items=out)
        items[:] = left

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """End this process after an illegal access, as every later call in it fails; xdist starts another one."""
        torch = sys.modules.get("torch")
        if torch and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    plan = json.loads(os.environ[PLAN])
    config.pluginmanager.register(Runner(config, plan))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(config, plan))
