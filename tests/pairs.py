"""make versions: the oldest and the newest PyTorch that Pythons here can have, with its Triton, run part of the tests.

    python3 tests/pairs.py              every pair in PAIRS, one after the other; keeps pairs.json
    python3 tests/pairs.py 2.9.1        one of them
    python3 tests/pairs.py --table      only writes the table in docs/use/support.md again; the others do, too

Each pair has its own environment, of 5 to 7 GB where PyTorch brings CUDA, which is removed behind it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "pairs.json"
PAGE = ROOT / "docs" / "use" / "support.md"
MARKED = re.compile(r"(<!-- pairs -->\n).*?(<!-- /pairs -->)", re.DOTALL)

BRINGS = {"2.9": "3.5", "2.10": "3.6", "2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}
"""The Triton that a release of PyTorch names in its metadata, on Linux."""
NEEDED = "3.6"
"""The oldest Triton on which the kernels compile."""
MINORS = (10, 11, 12, 13)
"""The Pythons of pyproject.toml: 3.10 and so on."""


class Pair(NamedTuple):
    """A release of PyTorch, the Triton that it brings, and the Pythons to look for, best first."""

    torch: str
    triton: str
    minors: Sequence[int]


PAIRS = (
    Pair("2.9.1", "3.5.1", MINORS),  # the oldest
    Pair("2.10.0", "3.6.0", MINORS),  # the oldest whose Triton compiles the kernels
    Pair("2.15.0", "3.9.0", MINORS[:0:-1]),  # the newest, which needs Python 3.11
)
CONFORMANCE = "tests/conformance/test_conformance.py"
TOPICS = {
    "calls": ("tests/test_exports.py", "tests/test_explain.py", "tests/test_merge.py"),
    "cpu": (CONFORMANCE, "-k", "cpu and (sink or documents)"),
    "operator": ("tests/test_operator.py", "-k", "compile or inductor or export or autocast"),
    "interpreter": (CONFORMANCE, "-k", "triton-interpreter and sink"),
    "kernels": ("tests/triton/test_compile.py", "--compile", "-k", "sm_86-oldest"),
}
"""What is run: arguments of pytest."""
TITLES = {"calls": "API", "cpu": "CPU", "operator": "compile, export", "interpreter": "Triton's interpreter",
          "kernels": "kernels compiled for sm_86"}  # fmt: skip
ASK = "import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)"
WITH_TRITON = ("interpreter", "kernels")


def number(version: str) -> tuple[int, ...]:
    """The first two numbers, to compare."""
    return tuple(int(part) for part in version.split(".")[:2])


def pythons(minor: int) -> Iterator[str]:
    """Where Python 3.minor may lie: on the path, or among pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from filter(None, [shutil.which(f"python3.{minor}")])
    yield from map(str, sorted(home.glob(f"versions/3.{minor}.*/bin/python3.{minor}"), reverse=True))


def interpreter(pair: Pair) -> str | None:
    """The first Python of a pair that runs; pyenv's shims are there without it."""
    for minor in pair.minors:
        for python in pythons(minor):
            if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
                return python
    return None


def outcome(arguments: Sequence[str], python: str) -> str:
    """pytest's last line of a topic, as "12 passed, 3 skipped"; failures are shown as they are."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [python, "-m", "pytest", "-q", "--durations=0", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.splitlines()[-1] if done.stdout else "")
    if done.returncode:
        print(done.stdout[-4000:] + done.stderr[-4000:])
    return ", ".join(found) or f"pytest ended with {done.returncode}"


@contextmanager
def environment(pair: Pair, python: str) -> Iterator[str]:
    """The Python of a new environment that has the pair, until it is no longer needed."""
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        own = str(Path(folder) / "bin" / "python")
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        numpy = "numpy<2.4" if number(pair.triton) <= number("3.6") else "numpy"  # Triton 3.6's interpreter
        for wanted in ([f"torch=={pair.torch}"], [f"triton=={pair.triton}", "pytest>=8", numpy]):
            subprocess.run([*pip, *wanted], check=True)
        yield own


def tried(pair: Pair, own: str) -> dict[str, Any]:
    """What came out of every topic in that environment."""
    found = subprocess.run([own, "-c", ASK], check=True, capture_output=True, text=True).stdout.split()
    row: dict[str, Any] = dict(zip(("python", "torch", "triton"), found, strict=True))
    compiles = number(pair.triton) >= number(NEEDED)
    for topic, arguments in TOPICS.items():
        row[topic] = outcome(arguments, own) if compiles or topic not in WITH_TRITON else None
        print(f"PyTorch {pair.torch}: {TITLES[topic]}: {row[topic]}", flush=True)
    return row


def table(record: dict[str, Any]) -> str:
    """What each release of PyTorch brings, and what was seen of it."""
    seen = {number(torch): row for torch, row in record.items()}
    lines = ["| PyTorch | brings Triton | GPU kernels | tried with | " + " | ".join(TITLES.values()) + " |"]
    lines.append("|---" * (4 + len(TITLES)) + "|")
    for torch, triton in BRINGS.items():
        kernels = "yes" if number(triton) >= number(NEEDED) else f"no: they need Triton {NEEDED}"
        row = seen.get(number(torch), {})
        tried_with = f"Python {row['python']}, PyTorch {row['torch']}, Triton {row['triton']}" if row else ""
        cells = [torch, triton, kernels, tried_with, *((row.get(topic) or "") for topic in TOPICS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(record: dict[str, Any]) -> None:
    text = PAGE.read_text()
    PAGE.write_text(MARKED.sub(lambda found: found[1] + table(record) + found[2], text))


def main(arguments: Sequence[str]) -> int:
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    chosen = [] if "--table" in arguments else [pair for pair in PAIRS if not arguments or pair.torch in arguments]
    for pair in chosen:
        if python := interpreter(pair):
            with environment(pair, python) as own:
                record[pair.torch] = tried(pair, own)
            record = {each.torch: record[each.torch] for each in PAIRS if each.torch in record}
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
        else:
            print(f"PyTorch {pair.torch} is not tried: none of Python 3.{', 3.'.join(map(str, pair.minors))} is here")
    write(record)
    return int(any("failed" in str(cell) or "ended" in str(cell) for row in record.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
