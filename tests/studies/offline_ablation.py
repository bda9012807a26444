"""Compiles the changed kernels of the ablation suite for sm_90 without a GPU, and the kernels that they change.

One JSON line each; the unchanged ones are called by their back end. Run it in a separate process with
TRITON_INTERPRET=0, as offline.py does.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from tilewise.call.operands import Operands

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
sys.path.append(str(Path(__file__).parents[2]))
from offline import innermost_loops, meta, read, sass, use_target

from studies.ablation.changes import CHANGES, Change, forward, problem, why_not

COMPILED = {
    "without warp roles": ((64, True), (128, False), (256, True)),
    "without overlap": ((128, True),),
    "without ping-pong": ((64, True),),
    "with ping-pong": ((128, False),),
    "without persistence": ((128, True),),
    "shortest tiles first": ((128, True),),
    "whole corners": ((128, True),),
    "masks on every tile": ((128, True),),
    "triton, 4 warps": ((64, True),),
    "triton, 8 warps": ((128, True),),
    "triton, keys outside": ((64, True), (128, False), (256, True)),
}
"""Of each change: head size and whether causal."""


def found(launch: Any) -> dict[str, Any]:
    """What became of a launch."""
    compiled = launch.compile()
    text = sass(compiled.asm["cubin"])
    instructions = "\n".join(line for line in text.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ ", line))
    loops = innermost_loops(text, r"\bHGMMA\b")
    return read(compiled)._asdict() | {
        "programs": launch.programs,
        "code": hashlib.sha256(instructions.encode()).hexdigest(),
        "tma": "UTMALDG" in text,
        "roles": "USETMAXREG" in text,
        "waits": [re.findall(r"DEPBAR\.LE gsb0, 0x(\d)", body) for body in loops],
        "turns": any("BAR.ARV" in body for body in loops),
    }


def unchanged(change: Change, D: int, causal: bool) -> Any:
    """The launch that is changed."""
    q = meta(4, 4096, 2048 // D, D, dtype=torch.bfloat16)
    assert why_not(change, q.shape, q.dtype, causal, "sm_90") is None
    x = Operands(q, q, q, ())
    return forward(problem(change, x, causal, "sm_90"), x)[0]


def main() -> Iterator[dict[str, Any]]:
    """Every change, and once what it changes."""
    use_target("sm_90")
    seen = set()
    for name, change in CHANGES.items():
        for D, causal in COMPILED[name]:
            launch = unchanged(change, D, causal)
            if (change.backend, D, causal) not in seen:
                seen.add((change.backend, D, causal))
                yield {"change": change.backend, "D": D, "causal": causal} | found(launch)
            yield {"change": name, "D": D, "causal": causal} | found(change.apply(launch))


if __name__ == "__main__":
    for line in main():
        print(json.dumps({"triton": triton.__version__, **line}), flush=True)
