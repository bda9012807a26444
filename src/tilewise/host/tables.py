"""Tables of tile sizes, by kernel and kind of problem, which measured rows from a file can replace.

A back end's tiles.py holds the default rows. TILEWISE_TILES names a file that `studies tune --write` made. Its rows
for the GPU of a call replace the defaults (docs/internals/adr/0009).
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from ..call.backend import ORDER

VARIABLE = "TILEWISE_TILES"
Table = dict[Any, Any]
"""Rows, each a NamedTuple, by a key of numbers and words."""

POWERS, STAGES = (8, 16, 32, 64, 128, 256, 512), tuple(range(1, 9))
ALLOWED: dict[str, dict[str, tuple[int | None, ...]]] = {
    "triton": {
        "B_r": POWERS, "B_c": POWERS, "warps": (1, 2, 4, 8, 16), "stages": STAGES,
        "registers": (None, *range(24, 256, 8)),
    },
    "hopper": {
        "B_r": (64, 128), "B_c": (32, 64, 128), "warpgroups": (1, 2, 3), "programs": (1, 2, 3),
        "q_stages": STAGES, "kv_stages": STAGES, "do_stages": STAGES, "wait_pv": (0, 1, 2, 3),
        "registers": tuple(range(24, 248, 8)),
    },
}  # fmt: skip
"""The values allowed in a file, by back end and field. Others would give wrong results or fail to compile."""


def in_use(backend: str, tables: Mapping[str, Table], device: torch.device) -> Mapping[str, Table]:
    """Return a back end's tables by name, with rows for this GPU from the file in place of the defaults."""
    path = os.environ.get(VARIABLE)
    if not path:
        return tables
    found = rows_of_card(Path(path), device).get(backend, {})
    if unknown := set(found) - set(tables):
        raise ValueError(_broken(path, f"unknown tables of {backend}: {', '.join(sorted(unknown))}"))
    allowed = ALLOWED[backend]
    return {name: table | _rows(path, name, table, found.get(name, {}), allowed) for name, table in tables.items()}


def source_of_rows(device: torch.device) -> str:
    """Say where this device's tile sizes come from."""
    path = os.environ.get(VARIABLE)
    if not path:
        return "rows of the package"
    has = "rows of" if rows_of_card(Path(path), device) else "rows of the package, none for this card in"
    return f"{has} {path}"


def rows_of_card(path: Path, device: torch.device) -> dict[str, Any]:
    """Return a file's rows for a device, by back end, table and label."""
    return read(path)["cards"].get(card(device), {}).get("rows", {})


@lru_cache(64)
def card(device: torch.device) -> str:
    """Return a GPU's product name, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@lru_cache(64)
def read(path: Path) -> dict[str, Any]:
    """Read a file of rows, or raise a ValueError with the remedy."""
    try:
        content = json.loads(path.read_text())
        by_backend = [item for run in content["cards"].values() for item in run["rows"].items()]
        shaped = all(isinstance(rows, dict) for _, tables in by_backend for rows in tables.values())
    except FileNotFoundError:
        raise ValueError(
            f"{VARIABLE} must name a file of rows, got {path}, which does not exist; write it with `python -m studies "
            f"tune --write {path}`, or unset {VARIABLE}"
        ) from None
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(_broken(path, "other content")) from error
    if not shaped:
        raise ValueError(_broken(path, "other content"))
    if unknown := {backend for backend, _ in by_backend} - set(ORDER):
        raise ValueError(_broken(path, f"unknown back ends: {', '.join(sorted(unknown))}"))
    return content


def label(key: Any) -> str:
    """Return a key as written in a file, such as "64 small"."""
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _rows(path: str, name: str, table: Table, found: dict[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> Table:
    """Check a file's rows of one table, and return them by the table's keys."""
    keys = {label(key): key for key in table}
    if unknown := set(found) - set(keys):
        raise ValueError(_broken(path, f"unknown rows of table {name}: {', '.join(sorted(unknown))}"))
    return {
        keys[text]: _row(path, f"row {text} of table {name}", table[keys[text]], fields, allowed)
        for text, fields in found.items()
    }


def _row(path: str, where: str, like: Any, fields: Any, allowed: Mapping[str, tuple[Any, ...]]) -> Any:
    """Check a file's fields, and return them as a row of the same class as `like`."""
    if not isinstance(fields, dict) or set(fields) != set(like._fields):
        raise ValueError(_broken(path, f"{where} without exactly the fields {', '.join(like._fields)}"))
    for field, kind in get_type_hints(type(like)).items():
        value = fields[field]
        if type(value) not in (get_args(kind) or (kind,)):
            raise ValueError(_broken(path, f"{field} = {value!r} in {where}"))
        if value not in allowed.get(field, (value,)):
            among = ", ".join(map(str, allowed[field]))
            raise ValueError(_broken(path, f"{field} = {value!r} in {where}, which is none of {among}"))
    return like._replace(**fields)


def _broken(path: str | Path, got: str) -> str:
    return (
        f"{path} must be a file of rows, got {got}; remove it and write it again with `python -m studies tune --write "
        f"{path}`, or unset {VARIABLE}"
    )
