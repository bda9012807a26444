"""Compiles the kernels of examples/minimal without a GPU: one JSON line each. Its argument is "sm_80" or "sm_90".

Run it in a separate process with TRITON_INTERPRET=0, as tests/triton/offline.py does, whose tools it uses.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "minimal"), str(ROOT / "tests" / "triton")]
from offline import meta, read, sass, use_target  # noqa: E402

HALF, FULL = torch.bfloat16, torch.float32
SIZES = ((HALF, 256), (FULL, 64))


def compiled(name, dtype, d, kernel):
    """What became of one kernel."""
    return {"kernel": name, "dtype": str(dtype).removeprefix("torch."), "d": d} | read(kernel)._asdict()


class CompileOnly:
    """Stands in for a kernel: its launch compiles it for the arguments given, and keeps the result."""

    def __init__(self, kernel):
        self.kernel, self.result = kernel, None

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **constants):
        self.result = self.kernel.warmup(*arguments, **constants, grid=(1,))


def triton_kernels():
    """The kernels of stages 6 and 7."""
    import triton_backward
    import triton_forward

    forward = triton_forward.forward = CompileOnly(triton_forward.forward)
    backward = {name: CompileOnly(getattr(triton_backward, name)) for name in ("delta", "dkdv", "dq")}
    vars(triton_backward).update(backward)
    for dtype, d in SIZES:
        x = meta(2, 130, d, dtype=dtype)
        O, lse = triton_forward.attention(x, x, x, causal=True)
        triton_backward.backward(x, x, x, O, lse, x, causal=True)
        for name, compiler in {"forward": forward, **backward}.items():
            yield compiled(name, dtype, d, compiler.result)


def hopper_kernels():
    """The kernel of stage 8."""
    import hopper_forward

    compiler = CompileOnly(hopper_forward.forward)
    for dtype, d, causal in ((HALF, 64, True), (torch.float16, 128, False)):
        x = meta(2, 130, d, dtype=dtype)
        hopper_forward.forward = compiler
        hopper_forward.attention(x, x, x, causal)
        row = compiled("hopper forward", dtype, d, compiler.result)
        yield row | {"tma": "UTMALDG" in sass(compiler.result.asm["cubin"])}


if __name__ == "__main__":
    use_target(sys.argv[1])
    for row in triton_kernels():
        print(json.dumps(row), flush=True)
    if sys.argv[1] == "sm_90":
        for row in hopper_kernels():
            print(json.dumps(row), flush=True)
