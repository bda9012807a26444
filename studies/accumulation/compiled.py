"""python -m studies.accumulation.compiled TARGET SHARES SHARE: compile the kernels for a chip, without a GPU.

It prints a line of JSON for each kernel. Every SHARES-th is compiled, from SHARE on, so that several processes can
share the work. TRITON_INTERPRET must be 0.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from tilewise.call.check import describe_fake
from tilewise.call.operands import Operands
from tilewise.call.recipe import Recipe
from tilewise.warm.cross_compile import use_target

from . import launch
from .measure import KERNELS, TILES, tiles_for
from .speed import Kernel, cases


def compiled(target: str, kernel: Kernel, tiles: Any) -> Any:
    """Compile a kernel."""
    case = cases(kernel.head_size)[0]
    q = torch.empty(case.shape, dtype=case.type, device="meta")
    x = Operands(q, q, q, ())
    p = describe_fake(x, Recipe(), (0, 0), target)
    (one,) = launch.launches(p, x, torch.empty_like(q), kernel.of.accumulate(torch.zeros(1)), tiles)
    return one.compile()


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers, and bytes of local memory, of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[union-attr]
    return registers, stack + local


def main(target: str, shares: int, share: int) -> None:
    """Compile and print."""
    use_target(target)
    work = [
        (Kernel(target, size, list(sizes), asdict(c)), tiles)
        for size in TILES
        for sizes, tiles in zip(TILES[size], tiles_for(size), strict=True)
        for c in KERNELS
    ]
    for kernel, tiles in work[share::shares]:
        try:
            made = compiled(target, kernel, tiles)
            kernel.registers, kernel.spills = resources(made.asm["cubin"])
            kernel.shared = made.metadata.shared
        except Exception as error:  # whatever the compiler raises
            kernel.why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        print(json.dumps(asdict(kernel)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
