"""The launches of a call that has not run, from tensors without memory; and its gradient's kernels, compiled meanwhile.

All of a compilation but its first part, which is Python, runs beside other threads.
"""

from contextlib import suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ..call.backend import BACKWARD, FORWARD, planned
from ..call.operands import Operands
from ..call.problem import Problem, TensorSpec
from .compile_once import compile_once
from .launch import NO_CONTEXT, RECORDED, Launch


def recorded(
    p: Problem, wanted: tuple[bool, ...] | None, lse: bool = False, aligned: bool = True
) -> tuple[list[Launch], list[Launch]]:
    """Return the launches of a forward, and of its gradient, by running a back end on tensors without memory.

    Args:
        p: the forward's problem.
        wanted: which extra operands want a gradient; None if there is no gradient.
        lse: whether lse may have a gradient.
        aligned: whether the gradient of o starts on a 16-byte boundary.
    """
    x = Operands(*(meta_tensor(spec) for spec in p[1:4]), tuple(meta_tensor(spec) for spec in p.extra))  # type: ignore
    seed = torch.empty((), dtype=torch.int64, device="meta") if p.recipe.dropout else None
    found: list[Launch] = []
    token = RECORDED.set(found)
    try:
        saved = planned(p, FORWARD).run(x, seed)
        count = len(found)
        if wanted is not None:
            # with results in fp32, gradients.py passes delta on as a gradient of lse, and gives o in q's type
            of_lse = (None, saved.lse)[: 1 + lse] if p.out_dtype == p.dtype else (saved.lse,)
            p = p._replace(wanted=wanted, recipe=p.recipe.of_gradients())
            o = torch.empty(saved.o.shape, dtype=p.dtype, device="meta")  # empty_like imports SymPy
            saved, do = saved._replace(o=o), meta_tensor(TensorSpec.of(o)._replace(aligned=aligned))
            for dlse in of_lse:
                planned(p, BACKWARD).run(x, saved, do, dlse)
    finally:
        RECORDED.reset(token)
    return found[:count], found[count:]


def meta_tensor(spec: TensorSpec) -> Tensor:
    """Return a meta tensor of this shape, these strides and this alignment."""
    reach = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    memory = torch.empty(max(0, reach) + 2, dtype=spec.dtype, device="meta")
    return memory.as_strided(spec.shape, spec.stride, 0 if spec.aligned else 1)


def compile_gradient(p: Problem, wanted: tuple[bool, ...]) -> None:
    """Start to compile the kernels of a forward's gradient, a thread each; a backward that needs one waits for it.

    A process that ends meanwhile waits, too: a compiler must not outlive it.
    """

    def start() -> None:
        with suppress(Exception):  # the backward fails for the same reason, in words
            for launch in recorded(p._replace(), wanted)[1]:  # a problem of its own, which keeps no launches
                Thread(target=compile_ahead, args=(launch, p.q.device)).start()

    Thread(target=start).start()


def compile_ahead(launch: Launch, device: torch.device) -> None:
    """Compile a kernel and build its launcher, into Triton's cache."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else NO_CONTEXT  # a thread begins at the first
    with suppress(Exception), on_device:
        compile_once(launch.kernel.fn.__name__, lambda: build_launcher(launch.compile()))


def build_launcher(kernel: Any) -> None:
    """Build a kernel's launcher, if this Triton (such as 3.6) compiles one in C, and a driver is installed to link."""
    if kernel.metadata.target.backend != "cuda":
        return
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "compile_module_from_src"):
        return
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError):  # no driver
        return
    if not hasattr(nvidia.CudaUtils, "instance"):  # from another cache, it would give descriptors a second type
        nvidia.CudaUtils()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)
