"""Compiles the kernels of a call for a chip that is not here, and reads what came out.

Must run in a process where TRITON_INTERPRET is off: `python tests/triton/offline.py sm_90 …` prints one JSON line a kernel.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tilewise.api import Full, _gather, _hypothetical
from tilewise.triton import launch


class Driver:
    """Enough of a driver to compile; nothing can be launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def is_active(self) -> bool:
        return True


class Compiled(NamedTuple):
    """What one kernel became."""

    name: str
    shared: int
    """Bytes of shared memory."""
    loop_spills: int
    """Local loads and stores inside an innermost loop that holds matrix instructions: the worst such loop."""
    matrix: tuple[str, ...]
    """The kinds of matrix instructions found."""
    registers: int


def gpu_target(name: str) -> GPUTarget:
    """The Triton target of a name like "sm_90" or "gfx942"."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)


def use_target(name: str) -> None:
    """Makes Triton compile for this chip: once per process, since compiled kernels are kept by device."""
    driver.set_active(Driver(gpu_target(name)))


def launches(target: str, q: Any, k: Any, v: Any, wanted: bool = False, **options: Any) -> list[launch.Launch]:
    """Every launch of forward and backward of a call with meta tensors."""
    defaults = {
        "mask": Full(), "score": (), "scale": None, "sink": None, "dropout": 0.0, "layout": None, "precision": None,
        "deterministic": False, "backend": None,
    }  # fmt: skip
    x, recipe, longest = _gather(q, k, v, *{**defaults, **options}.values())
    p = _hypothetical(x, recipe, longest, target)
    p = p._replace(wanted=tuple(wanted and t.dtype.is_floating_point and t.ndim == 4 for t in x.extra))
    seed = torch.empty((), dtype=torch.int64, device="meta") if recipe.dropout else None
    saved = launch.empty_saved(p, x, seed)
    delta, grads = torch.empty_like(saved.lse), launch.empty_grads(p, x)
    do, dlse = torch.empty_like(saved.o), torch.empty_like(saved.lse)
    return [*launch.forward_launches(p, x, saved), *launch.backward_launches(p, x, saved, do, dlse, delta, grads)]


def read(name: str, kernel: Any) -> Compiled:
    """Disassembles a compiled kernel."""
    if "cubin" in kernel.asm:
        text, usage = _sass(kernel.asm["cubin"])
        matrix, local = r"\b(HGMMA|QGMMA|IGMMA|HMMA|UTCHMMA|UTCQMMA|UTCMMA|QMMA|IMMA)\b", r"\b(LDL|STL)\b"
        registers = int(re.search(r"REG:(\d+)", usage).group(1))
    else:
        text = kernel.asm["amdgcn"]
        matrix, local, registers = r"\b(v_mfma|v_wmma)", r"\b(scratch_load|scratch_store|buffer_(?:load|store)\S* .*scratch)", 0
    found = tuple(sorted(set(re.findall(matrix, text))))
    loops = [body for body in _innermost_loops(text) if re.search(matrix, body)]
    spills = max((len(re.findall(local, body)) for body in loops), default=0)
    return Compiled(name, kernel.metadata.shared, spills, found, registers)


def _sass(cubin: bytes) -> tuple[str, str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return tuple(
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )


def _innermost_loops(text: str) -> list[str]:
    """The text between every backward branch and its target, where no other such stretch lies inside."""
    lines = text.splitlines()
    at: dict[str, int] = {}
    stretches = []
    for number, line in enumerate(lines):
        if address := re.match(r"\s+/\*([0-9a-f]{4,})\*/", line):
            at[address.group(1).lstrip("0")] = number
        if label := re.match(r"(\.?L\S+):", line):
            at[label.group(1)] = number
        jump = re.search(r"\bBRA(?:\.\S+)? .*?0x([0-9a-f]+)|\bs_c?branch\S* (\.?L\S+)", line)
        start = at.get((jump.group(1) or "").lstrip("0") or jump.group(2)) if jump else None
        if start is not None:
            stretches.append((start, number))
    inner = [(a, b) for a, b in stretches if not any((c, d) != (a, b) and a <= c and d <= b for c, d in stretches)]
    return ["\n".join(lines[a:b]) for a, b in inner]


def main(targets: list[str]) -> None:
    """One line per kernel of plain and rich calls, for looking at tiles while choosing them."""
    import tilewise as tw  # noqa: PLC0415

    for target in targets:
        use_target(target)
        for dtype in (torch.bfloat16, torch.float32) if target not in ("sm_70", "sm_75") else (torch.float16, torch.float32):
            for D in (64, 128, 256):
                q = torch.empty(2, 1024, 4, D, dtype=dtype, device="meta")
                for mask in (tw.Causal(),):
                    for one in launches(target, q, q, q, mask=mask):
                        name = one.kernel.fn.__name__
                        try:
                            c = read(name, one.compile())
                            print(target, dtype, D, *c, flush=True)
                        except Exception as error:  # noqa: BLE001
                            print(target, dtype, D, name, "FAILED", str(error)[:300].replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
