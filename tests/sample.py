"""Compile one variant of every kernel for one GPU, which need not be installed: one JSON line a kernel.

TRITON_INTERPRET=0 python tests/sample.py
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tilewise as tw
from tilewise.warm.cross_compile import use_target
from tilewise.warm.precompile import launches as recorded
from tilewise.warm.warm import Call

sys.path.insert(0, str(Path(__file__).parent / "host"))
from first import of_others, problem_of

LENGTH = 1024


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def calls() -> Iterator[Call]:
    """Calls that launch every kernel of attention, with their gradients."""
    q, x = meta(1, LENGTH, 4, 64), meta(1, LENGTH, 2, 64)
    bias = tw.Bias(meta(1, 4, LENGTH, LENGTH))
    for backend in ("hopper", "triton"):
        listed = {"mask": tw.Dense(meta(LENGTH, LENGTH, dtype=torch.bool)), "score": bias, "backend": backend}
        yield Call(problem_of(q, x, x, mask=tw.Causal(), backend=backend)[0], ())
        yield Call(problem_of(q, x, x, **listed)[0], (False, True))
        layout = tw.Cached(meta(1, dtype=torch.int32))
        yield Call(problem_of(meta(1, 1, 4, 64), x, x, mask=tw.Causal(), layout=layout, backend=backend)[0], None)
    sink = meta(4, dtype=torch.float32)
    yield Call(problem_of(q, x, x, sink=sink, backend="triton")[0], (True,))
    wide = meta(1, LENGTH, 2, 320)
    yield Call(problem_of(wide, wide, wide, mask=tw.Causal(), backend="triton")[0], ())
    wide = meta(1, LENGTH, 2, 192)
    yield Call(problem_of(wide, wide, wide, mask=tw.Causal(), backend="hopper")[0], ())
    few = meta(1, 64, 4, 64)
    yield Call(problem_of(few, few, few, mask=tw.Causal(), backend="triton")[0], ())
    yield Call(problem_of(q, x, x, mask=tw.Causal(), precision="int8", backend="hopper")[0], None)
    yield Call(problem_of(q, x, x, mask=tw.Causal(), deterministic=True, backend="hopper")[0], ())
    single = [t.float() for t in (q, x, x)]
    yield Call(problem_of(*single, mask=tw.Causal(), precision="fp16x3", backend="hopper")[0], ())


def kernels() -> dict[tuple[str, str], Any]:
    """One launch of each kernel, by its module and name."""
    launches = [one for call in calls() for one in recorded(call)]
    launches += [one for _, make in of_others() for one in make()]
    return {(one.kernel.fn.__module__, one.kernel.fn.__name__): one for one in reversed(launches)}


if __name__ == "__main__":
    use_target("sm_90")
    for (module, name), launch in kernels().items():
        compiled = launch.compile()
        print(json.dumps({"module": module, "name": name, "bytes": len(compiled.asm["cubin"])}), flush=True)
