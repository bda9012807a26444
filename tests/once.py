"""Skip a test of kernels that passed, until something that it reads has changed: `@pytest.mark.once(*reads)`.

What such a test does is compiled or interpreted from files alone, so it takes minutes and ends as it did before.

make test ARGS=--again     runs them all, and keeps in once.json which passed
"""

import ast
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RECORD = HERE / "once.json"
PACKAGE = HERE.parent / "src" / "tilewise"
ELSEWHERE = (
    "__init__.py", "__main__.py", "attention/api.py", "attention/eager.py", "attention/flops.py",
    "attention/gradients.py", "attention/op.py", "attention/reference.py", "call/calls.py", "call/count.py",
    "call/dispatch.py", "call/import_hook.py", "cli/", "compat/", "cpu/", "layout.py", "mask.py", "merge/api.py",
    "parallel/", "rotary/", "score.py", "warm/precompile.py", "warm/warm.py",
)  # fmt: skip
"""Files from which no kernel of attention is made: the scripts call `check.py`, `explain.py` and the back ends."""
ONLY_HOPPER = "hopper/"
"""Files from which the portable kernels, which tests/triton compiles, are not made."""


def key(test: Path, reads: Sequence[str]) -> str:
    """Hash what a test of kernels reads: the package's kernels and launches, the test, files and folders named relative
    to it, and the versions of PyTorch and Triton."""
    without = (*ELSEWHERE, ONLY_HOPPER) if test.parent.name == "triton" else ELSEWHERE
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if not f.relative_to(PACKAGE).as_posix().startswith(without)]
    for path in (test.parent / name for name in reads):
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return hashlib.sha256("\n".join([*_versions(), *_code([*files, test])]).encode()).hexdigest()[:12]


def read() -> dict[str, str]:
    """Return the key with which each test passed last, by its name."""
    if not RECORD.exists():
        return {}
    by_function = json.loads(RECORD.read_text())
    return {f"{function}{case}": key for function, cases in by_function.items() for case, key in cases.items()}


def keep(passed: dict[str, str]) -> None:
    """Add tests that passed to the record."""
    by_function: dict[str, dict[str, str]] = {}
    for name, known in sorted({**read(), **passed}.items()):
        function, bracket, case = name.partition("[")
        by_function.setdefault(function, {})[bracket + case] = known
    RECORD.write_text(json.dumps(by_function, indent=1) + "\n")


def _versions() -> Iterator[str]:
    yield metadata.version("torch").partition("+")[0]  # without the place that it is built for
    if torch.cuda.is_available():  # what passed in Triton's interpreter has yet to run there
        yield "GPU"
    with suppress(metadata.PackageNotFoundError):  # the marked tests skip there
        yield metadata.version("triton")
    newest = os.environ.get("TILEWISE_TRITON_NEWEST")
    yield from sorted(path.name for path in Path(newest).glob("triton-*.dist-info")) if newest else ()


def _code(files: list[Path]) -> Iterator[str]:
    """Yield syntax trees without docstrings, so that neither they nor comments count; of other files the text."""
    for file in files:
        text = file.read_text()
        yield _tree(text) if file.suffix == ".py" else text


@cache
def _tree(text: str) -> str:
    tree: Any = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not _is_text(line)]
    return ast.dump(tree)


def _is_text(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
