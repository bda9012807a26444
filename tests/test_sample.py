"""One variant of every kernel compiles for one GPU. `make test ARGS=--compile` compiles all variants for all."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilewise"
STARTS = ("attention_", "cache_append", "rotary_embedding")


def kernels():
    """Every kernel of the package, by module and name: device functions with such names are launched."""
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.parse(file.read_text()).body:
            jitted = isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
            if jitted and node.name.startswith(STARTS):
                yield module, node.name


def test_one_variant_of_every_kernel_compiles():
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(ROOT)]),
    }
    command = [sys.executable, str(ROOT / "tests" / "sample.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["module"], row["name"]) for row in rows} == set(kernels())
    assert all(row["bytes"] > 0 for row in rows)
