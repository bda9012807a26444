"""Compiles racecheck's control for sm_90 without a GPU: one JSON line a kernel, with its arrivals at mbarriers.

Run it in a separate process with TRITON_INTERPRET=0, as offline.py does.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import control
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from offline import meta, use_target

EVENTS = {
    "store": r"\bst\.shared\.b",
    "load": r"\bld\.shared\.b(?!8)",
    "wait": r"\bmbarrier\.try_wait",
    "arrive": r"\bmbarrier\.arrive",
    "together": r"\bbar\.(?:warp\.)?sync",
}
"""Signs in PTX. Single bytes are Triton's own: which role a warp has."""


def events(ptx: str) -> str:
    """What a kernel does in shared memory, line by line."""
    found = (next((name for name, sign in EVENTS.items() if re.search(sign, line)), "") for line in ptx.splitlines())
    return " ".join(filter(None, found))


def main() -> Iterator[dict[str, Any]]:
    """The kernel with and without waits."""
    use_target("sm_90")
    for waits in (True, False):
        memory = meta(128, dtype=torch.int64), meta(1, dtype=torch.int32)
        compiled = control.send_dq.warmup(*memory, WAITS=waits, grid=(1,), num_warps=4)
        yield {"kernel": compiled.metadata.name, "events": events(compiled.asm["ptx"])}


if __name__ == "__main__":
    for line in main():
        print(json.dumps({"triton": triton.__version__, **line}), flush=True)
