"""What tests run under: Triton's interpreter where there is no GPU, fresh memory full of NaN, warnings as errors."""

import importlib
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that its default will change
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which tilewise does on first use

sys.path.insert(0, str(Path(__file__).parent))  # for the modules that tests share, such as conformance.cases

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CALM = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
OUTCOMES: dict[tuple[str, str], dict[str, str]] = {}
"""What came out of each (case, back end) of the conformance tests."""


def pytest_addoption(parser):
    parser.addoption("--conformance-report", metavar="FILE", help="where to write what ran where, as JSON")
    parser.addoption("--compile", action="store_true", help="also compile all variants of kernels for all GPUs")


def pytest_configure(config):
    for line in (
        "error",
        "ignore:.*does not have a deterministic implementation:UserWarning",  # torch's kernels, compared with on a GPU
        "ignore:.*defaults to a non-deterministic algorithm:UserWarning",
        "ignore:.*encountered in:RuntimeWarning",  # numpy, in Triton's interpreter, on inf and NaN
        "ignore:All-NaN:RuntimeWarning",
        "ignore:Guards may run slower:RuntimeWarning",  # torch.compile, on Python 3.13.0
        "ignore:The .grad attribute of a Tensor:UserWarning",  # opcheck, from PyTorch 2.15 on
        "ignore::DeprecationWarning:torch",
        "ignore:The distutils package is deprecated:DeprecationWarning",  # Inductor
        "ignore::FutureWarning:torch",
        "ignore::DeprecationWarning:triton",
    ):
        config.addinivalue_line("filterwarnings", line)
    config.addinivalue_line("markers", "compile: it compiles kernels for minutes, and runs with --compile")
    if config.option.durations is None:
        config.option.durations = 10
    torch.set_num_threads(1)  # the tensors are small, and pytest's workers share the cores
    # Every torch.empty, empty_like, new_empty and resize_ gives NaN (integers: the largest), in C++ as in Python.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if find_spec("interpreter"):  # a copy of this file alone has none
        importlib.import_module("interpreter").quicken()


def pytest_collection_modifyitems(config, items):
    """Tests that compile kernels take minutes each: first, so that no worker is alone with them at the end; and not at
    all without --compile, where one test compiles one variant of each (test_sample.py)."""
    items.sort(key=lambda item: item.get_closest_marker("compile") is None)
    if not config.getoption("--compile"):
        skip = pytest.mark.skip(reason="--compile runs it")
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(skip)


def pytest_sessionstart(session):
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):  # workers have none
        session.config.pluginmanager.register(AtOnce(terminal))


class AtOnce:
    """Print the name of a test when it fails, and not only at the end, which a run that is cut off does not reach."""

    def __init__(self, terminal):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)\n", red=True)
            self.terminal.flush()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        own = p.chromium.executable_path
        found = next(filter(None, map(shutil.which, BROWSERS)), own if Path(own).exists() else None)
        if not found:
            pytest.skip(f"no Chromium: looked for {', '.join(BROWSERS)} and playwright's own")
        browser = p.chromium.launch(executable_path=found, args=CALM)
        yield browser
        browser.close()


@pytest.fixture
def browse(browser):
    """Opens a page; at the end, nothing was fetched from elsewhere and no error was reported."""
    contexts, troubles, requests = [], [], []

    def open_page(url, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
    assert all(url.startswith(("file:", "data:")) for url in requests), requests


def pytest_runtest_logreport(report):
    run = dict(report.user_properties)
    if "case" in run and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if report.outcome == "skipped" else _last_error(report.longreprtext)
        known = OUTCOMES.setdefault((run["case"], run["backend"]), {"outcome": "passed", "reason": ""})
        if known["outcome"] != "failed" and report.outcome != "passed":
            known.update(outcome=report.outcome, reason=reason.removeprefix("Skipped: ").strip())


def _last_error(text):
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return lines[0] if lines else text


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return
    if not OUTCOMES:
        return
    file, cache = session.config.getoption("--conformance-report"), getattr(session.config, "cache", None)
    if not file and cache is None:  # -p no:cacheprovider
        return
    path = Path(file) if file else cache.mkdir("conformance") / "report.json"
    rows = [{"case": case, "backend": backend, **found} for (case, backend), found in OUTCOMES.items()]
    path.write_text(json.dumps(rows, indent=1))
