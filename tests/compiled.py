"""Skip a test of compiled kernels that passed, until something that it reads has changed.

make test ARGS=--compile     runs them all, and keeps in compiled.json which passed
"""

import ast
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "compiled.json"
PACKAGE = HERE.parent / "src" / "tilewise"
ELSEWHERE = (
    "__init__.py", "__main__.py", "api.py", "cli/", "compat/", "count.py", "cpu/",
    "host/precompile.py", "host/rotary.py", "import_hook.py", "known.py", "merge.py", "operator.py", "parallel/",
    "reference.py", "rotary.py", "tile/rotary.py", "warm.py",
)  # fmt: skip
"""Files from which no kernel of attention is made: the scripts call `check.py`, `explain.py` and the back ends."""
ONLY_HOPPER = "hopper/"
"""Files from which the portable kernels, which tests/triton compiles, are not made."""


def key(test: Path, reads: Sequence[str]) -> str:
    """Hash what a test of compiled kernels reads: the package's kernels and launches, the test, files and folders named
    relative to it, and the versions of Triton."""
    without = (*ELSEWHERE, ONLY_HOPPER) if test.parent.name == "triton" else ELSEWHERE
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if not f.relative_to(PACKAGE).as_posix().startswith(without)]
    for path in (test.parent / name for name in reads):
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return hashlib.sha256("\n".join([*_tritons(), *_code([*files, test])]).encode()).hexdigest()[:12]


def read() -> dict[str, str]:
    """Return the key with which each test passed last, by its name."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def keep(passed: dict[str, str]) -> None:
    """Add tests that passed to the record."""
    RECORD.write_text(json.dumps(dict(sorted({**read(), **passed}.items())), indent=1) + "\n")


def _tritons() -> Iterator[str]:
    yield metadata.version("triton")
    newest = os.environ.get("TILEWISE_TRITON_NEWEST")
    yield from sorted(path.name for path in Path(newest).glob("triton-*.dist-info")) if newest else ()


def _code(files: list[Path]) -> Iterator[str]:
    """Yield syntax trees without docstrings, so that neither they nor comments count; of other files the text."""
    for file in files:
        if file.suffix != ".py":
            yield file.read_text()
            continue
        tree: Any = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [line for line in body if not _is_text(line)]
        yield ast.dump(tree)


def _is_text(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)
