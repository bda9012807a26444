"""Results: rows, their environments, and one folder for each machine, whose bench.json is replaced suite by suite."""

import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tilewise import explain
from tilewise.call.problem import target_of
from tilewise.cli.info import device_name, versions
from tilewise.triton.tiles import SHORT
from tilewise.values.products import EIGHT_BITS

from . import state
from .peers import CHANGED
from .state import PACKAGE
from .suites import BACKWARD, BOTH, FORWARD, Case, Suite
from .variants import VARIANTS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
"""A folder for each device, with all that was measured on it."""
OK, REFUSED, WRONG, FAILED, SKIPPED = "ok", "refused", "wrong", "failed", "skipped"
DIGITS = 6
"""Significant digits of a measured number in a file: enough that no page shows another number."""
OURS = "tilewise"
"""The implementation that is asked for nothing more."""
EXACT = {"case", "point", "combination", "settings", "losses"}
"""What keeps every digit: inputs, and losses, whose differences are read."""
CPU = torch.device("cpu")
WIDTH = 120
"""Columns of a file's lines, but for rows, which have one line each."""


@dataclass(eq=False)
class Row:
    """One implementation's pass over one case. Without a measurement, `why` says what was in the way."""

    case: dict[str, Any]
    implementation: str
    pass_: str
    status: str = OK
    why: str | None = None
    milliseconds: float | None = None
    """Median over rounds; device time on a GPU."""
    milliseconds_p20: float | None = None
    milliseconds_p80: float | None = None
    tflops: float | None = None
    matmul_tflops: float | None = None
    """Of a large square product in the same type, in the same rounds."""
    of_matmul: float | None = None
    peak_bytes: int | None = None
    """Above what was allocated before the call."""
    host_microseconds: float | None = None
    """What one call costs the thread that makes it, on a GPU."""
    host_microseconds_no_grad: float | None = None
    """The same of a forward under `torch.no_grad()`."""
    error: float | None = None
    """Largest absolute error against fp64; of a backward, in dq, dk and dv."""
    error_plain: float | None = None
    """Of plain torch in the same type."""

    @property
    def of(self) -> Case:
        """The case as a value."""
        return Case(**self.case)


ONE_TILE = max(SHORT)
"""Tokens up to which a call that names the portable back end runs kernels of one tile a head (triton/single)."""


def kernels_of(case: Case, implementation: str, pass_: str, known: Iterable[str]) -> set[str]:
    """Return the kernels that a row depends on, among those known where it was measured; none for other libraries."""
    word, *_ = implementation.split(" ")
    change = CHANGED.get(implementation)
    if word != "tilewise" and implementation not in VARIANTS and not change:
        return set()
    if not any(name.startswith("triton") for name in known):
        return {"cpu"}
    size = next((size for size in state.SIZES if case.head_size <= size), max(state.SIZES))
    _, _, precision = (change or implementation).partition(" ")
    ours = "triton" if precision in ("triton", "ieee", "tf32x3", "bf16x3", "tf32") else "hopper"
    in_codes = precision.split(" ")[0] in (*EIGHT_BITS, "e4m3")
    kind = "fp32 " if case.dtype == "fp32" else "8-bit " if in_codes else ""
    passes = [name for name in (FORWARD, BACKWARD) if pass_ in (name, BOTH)]
    names = {f"{_run_by(case, name) if implementation == OURS else ours} {kind}{name} D{size}" for name in passes}
    names = {name if name in known else name.replace("hopper", "triton") for name in names}
    one_tile = case.length <= ONE_TILE and not case.varied.packed and not kind
    if implementation != OURS and ours == "triton" and one_tile and f"triton single D{size}" in known:
        names = {f"triton single D{size}"}
    varied = VARIANTS.get(implementation, case.varied)
    values = *case.mask.parts, *case.padding(CPU).parts, *varied.mask.parts, *varied.score(case.heads, CPU)
    names |= {f"{value.what} {type(value).__name__.lower()}" for value in values}
    return names | ({"ablation"} if change else set()) | ({"quantize"} if in_codes else set())


def _run_by(case: Case, pass_: str) -> str:
    """Return the back end on Hopper whose kernels a pass of a plain call runs."""
    shape = (1, *case.shape) if case.varied.packed else case.shape
    q = torch.empty(shape, dtype=case.type, device="meta")
    found = explain(q, q, q, mask=case.mask, device="sm_90")
    return (found.backward if pass_ == BACKWARD else found.backend) or "hopper"


def slug(name: str) -> str:
    """Return a name as the name of a folder, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def file_of(folder: Path, device: str, name: str = "bench.json") -> Path:
    """Return where a device's file lies in a folder of results, such as nvidia-h200/bench.json."""
    return folder / slug(device) / name


def environment(device: torch.device) -> dict[str, Any]:
    """Return what identifies a measurement: device, versions, commit, kernels."""
    return {
        "device": device_name(device),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "kernels": _digest_on(device),
        "versions": versions(),
    }


STATES: dict[str, dict[str, str]] = {}
"""Of the kernels that were looked at here, by what stands for them in an environment."""


def _digest_on(device: torch.device) -> str:
    chips: tuple[str, ...] = ()
    if device.type == "cuda":
        from tilewise.triton import tiles

        chips = tiles.chips(target_of(device))
    found = state.states(chips=chips)
    STATES[state.digest(found)] = found
    return state.digest(found)


def save_states(content: dict[str, Any], environments: Iterable[dict[str, Any]]) -> None:
    """Name the states of a file's kernels once, next to its results."""
    for name in (env["kernels"] for env in environments if env["kernels"] in STATES):
        content.setdefault("kernels", {})[name] = STATES[name]


def drop_states(content: dict[str, Any]) -> None:
    """Drop the states of kernels that no run of a file names."""
    named = {run["environment"]["kernels"] for part in content.values() for run in _runs(part)}
    content["kernels"] = {name: state for name, state in content.get("kernels", {}).items() if name in named}


def _runs(part: Any) -> Iterator[dict[str, Any]]:
    """Yield what has an environment, at any depth."""
    if isinstance(part, dict) and "environment" in part:
        yield part
    elif isinstance(part, dict):
        for inner in part.values():
            yield from _runs(inner)


def changed(before: Mapping[str, str], names: Iterable[str], carried: Mapping[str, str]) -> list[str]:
    """Which kernels whose names begin so are others today than in the states `before`. A state that `carried` names
    stands for its heir."""
    now = state.states(chips=tuple(before.get("chips", "").split()))

    def heir(of: str | None) -> str | None:
        while of and of in carried:
            of = carried[of]
        return of

    of = [name for name in sorted({*before, *now}) if name.startswith(tuple(names))]
    return [name for name in of if heir(before.get(name)) != now.get(name)]


def _commit() -> str | None:
    """Return TILEWISE_COMMIT, or git's commit with "+" if files differ from it; None outside a checkout."""
    if given := os.environ.get("TILEWISE_COMMIT"):
        return given
    try:
        git = ["git", "-C", str(PACKAGE)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "--", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def load(path: Path) -> dict[str, Any]:
    """Read a results file; return an empty one if there is none. Raise ValueError for other content."""
    if not path.exists():
        return {"device": None, "suites": {}}
    try:
        content = unpacked(json.loads(path.read_text()))
        content["suites"].items()
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} must be a results file of tilewise, got other content; name another, or remove it"
        ) from error
    return content


def merge(
    path: Path,
    suite: str,
    rows: Sequence[Any],
    env: dict[str, Any],
    partial: bool,
    part: str = "suites",
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Put a suite's rows, and `more` about it, into a part of a file; other suites stay.

    Raise ValueError if the file is of another device.
    """
    content = load(path)
    if content["device"] not in (None, env["device"]):
        raise ValueError(f"{path} must hold results of {env['device']}, got {content['device']}; name another file")
    content["device"] = env["device"]
    run = {"environment": env, "partial": partial, **(more or {}), "rows": [asdict(row) for row in rows]}
    content.setdefault(part, {})[suite] = run
    save_states(content, [env])
    write(path, content)
    return load(path)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all, so that an interrupt leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text(packed(content)) + "\n")
    new.replace(path)


def packed(content: Any) -> Any:
    """Return a content as a file holds it: rounded, and rows as tables that state shared values once."""
    if isinstance(content, dict):
        return {
            key: _table(value) if key == "rows" and _are_rows(value) else value if key in EXACT else packed(value)
            for key, value in content.items()
        }
    if isinstance(content, list):
        return [packed(value) for value in content]
    if isinstance(content, float) and math.isfinite(content):
        return float(f"{content:.{DIGITS}g}")
    return content


def unpacked(content: Any) -> Any:
    """Return the content of a file. Rows that are written out, as in older files, stay as they are."""
    if isinstance(content, list):
        return [unpacked(value) for value in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {"same", "columns", "table"}:
        return [
            _nested({**content["same"], **dict(zip(content["columns"], row, strict=True))}) for row in content["table"]
        ]
    return {key: unpacked(value) for key, value in content.items()}


def text(content: Any) -> str:
    """Return JSON in which what fits stands on one line, and other entries and elements have a line each."""
    line = json.dumps(content, separators=(",", ":"))
    if len(line) <= WIDTH or not isinstance(content, (dict, list)):
        return line
    if isinstance(content, list):
        return "[\n" + ",\n".join(json.dumps(value, separators=(",", ":")) for value in content) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{text(value)}" for key, value in content.items()) + "\n}"


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rows as a table. Columns are in the order of their first appearance; missing values are null."""
    rounded = [packed(row) for row in rows]
    first = {key: value.keys() for key, value in rounded[0].items() if isinstance(value, dict) and value}
    alike = {
        key
        for key, names in first.items()
        if all(isinstance(row.get(key), dict) and row[key].keys() == names for row in rounded)
    }
    flat = [_flat(row, alike) for row in rounded]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    shared = [name for name in columns if len({json.dumps(row.get(name)) for row in flat}) == 1]
    varying = [name for name in columns if name not in shared]
    return {
        "same": {name: flat[0].get(name) for name in shared},
        "columns": varying,
        "table": [[row.get(name) for name in varying] for row in flat],
    }


def _flat(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a row with `case.length` in place of {"case": {"length": ...}}, for these names."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= {f"{key}.{name}": of for name, of in value.items()} if key in names else {key: value}
    return found


def _nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat row as nested dicts."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        outer, dot, name = key.partition(".")
        if dot:
            found.setdefault(outer, {})[name] = value
        else:
            found[key] = value
    return found


def rows_of(content: dict[str, Any], suite: str) -> list[Row]:
    """Return the rows of a loaded file's suite; none if it was not run."""
    return [Row(**row) for row in content["suites"].get(suite, {"rows": ()})["rows"]]


def comparable(file: Path, suite: Suite, env: dict[str, Any]) -> list[Row]:
    """Return a file's rows of a suite, without those that ran late, if kernels and versions are the same."""
    content = load(file)
    before = content["suites"].get(suite.name, {"environment": {}})["environment"]
    if any(before.get(name) != env[name] for name in ("device", "kernels", "versions")):
        return []
    rows = [row for row in rows_of(content, suite.name) if row.of in suite.cases]
    skipped = {row.of for row in rows if row.status == SKIPPED and "budget" in (row.why or "")}
    return [row for row in rows if row.of not in skipped]


def repeated(file: Path, content: dict[str, Any], suite: str) -> list[dict[str, Any]]:
    """Return a loaded file's run of a suite and those in runs/<suite>-*.json next to it, if they are of the kernels
    measured last; none if it was run once."""
    again = [load(path) for path in sorted(file.parent.glob(f"runs/{suite}-*.json"))]
    return newest([content, *again], suite) if suite in content["suites"] and again else []


def newest(contents: Sequence[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    """Return the runs of a suite with the kernels measured last."""
    origins = [content["suites"][suite]["environment"] for content in contents]
    kernels = max(origins, key=lambda of: of["when"])["kernels"]
    return [content for content, of in zip(contents, origins, strict=True) if of["kernels"] == kernels]
