"""Bundles of one small kernel, and of what it is found by. Run it in a separate process, with TRITON_INTERPRET=0:

python tests/host/bundled.py save FILE       write its bundle for two chips, and print what `save` returned
python tests/host/bundled.py found FILE      for each difference, whether the bundle has the kernel; then one compiles
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from tilewise.host.bundle import NO_LINES, Bundle, portable_key, use_bundle
from tilewise.warm.save import save
from tilewise.warm.warm import Call, call_of, warm_calls

CHIPS = ("sm_80", "gfx942")


def call(chip: str, size: int = 16) -> Call:
    """Return a call whose forward compiles in a second."""
    x = torch.empty(1, 80, 2, size, dtype=torch.float16, device="meta")
    return call_of(chip, False, x, x, x)


def write(path: str) -> Iterator[dict[str, Any]]:
    """Write the bundle."""
    files: dict[str, bytes] = {}
    made = [call(chip) for chip in CHIPS]
    for one in made:
        warm_calls([one], 1, files=files)
    yield {"sha256": save(path, files, made)}


def found(path: str) -> Iterator[dict[str, Any]]:
    """Look the kernel up as it was, and with each thing changed that the compiler reads."""
    from triton.backends.nvidia import compiler
    from triton.runtime import driver

    from tilewise.host import launch
    from tilewise.host.compile_once import _LockedCompiler
    from tilewise.triton.forward import attention_forward
    from tilewise.warm import precompile
    from tilewise.warm.cross_compile import TargetDriver, gpu_target

    bundle = Bundle(path)

    def entry(chip: str = CHIPS[0], size: int = 16) -> Any:
        driver.set_active(TargetDriver(gpu_target(chip)))  # type: ignore[arg-type]
        precompile.kernels.cache_clear()
        (one,) = precompile.kernels(call(chip, size)).values()
        return one

    def has(one: Any) -> bool:
        return portable_key(one.key, one.compile)[0] in bundle.kernels

    yield {"case": "the same", "found": has(entry())}
    yield {"case": "another maker's chip", "found": has(entry(CHIPS[1]))}
    os.environ[NO_LINES] = "1"
    yield {"case": "without lines", "found": has(entry())}
    del os.environ[NO_LINES]
    yield {"case": "another chip", "found": has(entry("sm_86"))}
    yield {"case": "another head size", "found": has(entry(size=32))}
    launch.FUSED["enable_fp_fusion"] = False
    yield {"case": "another option", "found": has(entry())}
    launch.FUSED["enable_fp_fusion"] = True
    version, compiler.get_ptxas_version = compiler.get_ptxas_version, lambda *_: "another"
    yield {"case": "another ptxas", "found": has(entry())}
    compiler.get_ptxas_version = version
    attention_forward.starting_line_number += 1
    attention_forward.hash = None
    other = entry()
    yield {"case": "another line", "found": has(other)}
    use_bundle(path)
    with warnings.catch_warnings(record=True) as said, ExitStack() as held:
        warnings.simplefilter("always")
        kernel = _LockedCompiler(other.name, held).submit(other.key, other.compile, lambda _: None)
    yield {"case": "compiled", "found": "ptx" in kernel.asm, "said": [str(one.message) for one in said]}


if __name__ == "__main__":
    command, file = sys.argv[1:]
    for line in {"save": write, "found": found}[command](file):
        print(json.dumps(line), flush=True)
