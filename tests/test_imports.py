"""Which modules need which packages: everything else imports without them."""

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from studies import environment

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "studies.app", "studies.console", "studies.accumulation.command", "studies.accuracy.command",
    "studies.bench.command", "studies.demo.demo", "studies.eight_bits.command", "studies.training.contest",
    "studies.training.train", "studies.tune.command",
)  # fmt: skip
NEEDED_BY = {
    "triton": (  # kernels and their launches
        "tilewise.tile.*", "tilewise.host.*", "tilewise.triton.*", "tilewise.hopper.*", "tilewise.*.kernel",
        "tilewise.*.launch", "tilewise.quantize.rounding", "tilewise.quantize.rows", "tilewise.quantize.statistics",
        "tilewise.warm.precompile", "tilewise.host.emit",
        "studies.ablation.kernels",
        "studies.accumulation.compiled", "studies.accumulation.forward", "studies.accumulation.launch",
        "studies.bench.serving",
    ),
    "rich": COMMANDS,
    "typer": COMMANDS,
    "matplotlib": (  # plots, and the pages and commands that have some
        "studies.app", "studies.accumulation.command", "studies.accumulation.page", "studies.accumulation.plots",
        "studies.accuracy.command", "studies.accuracy.page", "studies.demo.demo", "studies.eight_bits.command",
        "studies.pages.fp32", "studies.pages.plots", "studies.pages.report",
        "studies.training.contest", "studies.training.contests", "studies.training.contexts",
        "studies.training.pictures", "studies.training.train",
    ),
    "transformers": (),  # tilewise serves these, and imports them where one of its functions is called
    "diffusers": (),
    "timm": (),
}  # fmt: skip
"""By package, the modules that may need it. The test fails if another one does, and if a line is no longer true."""
EXCEPT = {
    "triton": (
        "tilewise.call.shortcuts", "tilewise.host.bundle", "tilewise.host.tables", "tilewise.hopper.tiles",
        "tilewise.triton.tiles",
    ),
}  # fmt: skip
"""Modules among those that must not: bundles, tables of tiles, and what helps to import the others."""

PROGRAM = """
import importlib, json, os, sys
import torch, torch._dynamo  # once for all, as they are slow

packages, modules = json.loads(sys.argv[1])
for package in packages:
    if os.fork():
        os.wait()
        continue
    sys.modules[package] = None  # so that it is not found
    needs = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            needs[name] = error.name.partition(".")[0]
    print(json.dumps([package, needs]), flush=True)
    os._exit(0)
"""


def modules():
    """Names of all modules of the package and the studies, and whether each is a package. `__main__` would run."""
    found = {}
    for folder in (ROOT / "src", ROOT):
        for path in sorted(file for top in ("tilewise", "studies") for file in (folder / top).rglob("*.py")):
            *parents, name = path.relative_to(folder).with_suffix("").parts
            if name != "__main__":
                found[".".join(parents if name == "__init__" else (*parents, name))] = name == "__init__"
    return found


def test_a_module_needs_no_package_that_it_can_do_without():
    for package in ("triton", "rich", "typer", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    is_package = modules()
    given = json.dumps([list(NEEDED_BY), list(is_package)])
    command = [sys.executable, "-c", PROGRAM, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=ROOT)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found.keys() == NEEDED_BY.keys(), done.stderr
    wrong = []
    for package, allowed in NEEDED_BY.items():
        may = {name for name in is_package for pattern in allowed if fnmatch(name, pattern)}
        may -= {name for name in is_package if is_package[name]} | {*EXCEPT.get(package, ())}
        needs = {name for name, missing in found[package].items() if missing == package}
        wrong += [f"{name} needs {missing}" for name, missing in found[package].items() if missing != package]
        wrong += [f"{name} needs {package}: import it where it is used" for name in sorted(needs - may)]
        idle = [pattern for pattern in allowed if not any(fnmatch(name, pattern) for name in needs)]
        wrong += [f"{pattern} no longer needs {package}: delete the line" for pattern in idle]
    assert not wrong, "\n".join(wrong)
