"""Grid and arguments of one launch a row of tiles, for sm_90: what the host decides, which no kernel's state knows.

python tests/host/launches.py          records a digest of each in launches.json
python tests/host/launches.py FILE     writes them in full, to compare those of two commits

Run it in a separate process with TRITON_INTERPRET=0, as it shares tests/*/offline.py, and needs no GPU.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from instructions import launches

RECORDED = Path(__file__).with_suffix(".json")


def told(x: Any) -> Any:
    """An argument as JSON: of a tensor its type, sizes, and strides unless they follow from those; of a device function
    its name."""
    match x:
        case Tensor():
            steps = "" if x.is_contiguous() else f" by {list(x.stride())}"
            return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{steps}"
        case tuple() | list():
            fields = getattr(x, "_fields", None)
            return dict(zip(fields, map(told, x), strict=True)) if fields else list(map(told, x))
        case bool() | int() | float() | str() | None:
            return x
        case _ if hasattr(x, "block_shape"):
            return f"{list(x.shape)} by {list(x.strides)} in boxes of {list(x.block_shape)}"
        case _:
            return getattr(getattr(x, "fn", x), "__name__", None) or repr(x)


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every launch, by its call and its place in it."""
    counts: dict[str, int] = {}
    for back, D, name, one in launches():
        call = f"{back} D{D} {name}: {one.kernel.fn.__name__}"
        counts[call] = counts.get(call, 0) + 1
        constants = {key: told(value) for key, value in one.constants.items()}
        yield (
            f"{call} {counts[call]}",
            {"programs": one.programs, "arguments": told(one.arguments), "constants": constants},
        )


def digest(launch: dict[str, Any]) -> str:
    """What is recorded of a launch."""
    return hashlib.sha256(json.dumps(launch).encode()).hexdigest()[:10]


if __name__ == "__main__":
    found = dict(recorded())
    if sys.argv[1:] == ["-"]:
        print(json.dumps(found))
    elif sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    else:
        RECORDED.write_text(json.dumps({name: digest(one) for name, one in found.items()}, indent=0) + "\n")
