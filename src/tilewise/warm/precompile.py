"""Ahead-of-time compilation, one worker process, which `warm` starts.

It compiles kernels for a chip that need not be installed. Separate processes are needed because Triton keeps its target
for as long as a process runs. The worker reads requests from standard input and writes an answer to each on standard
output; both are pickled.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime._async_compile import active_mode

from ..call.backend import BACKWARD, FORWARD, planned
from ..call.operands import Operands
from ..call.problem import TensorSpec
from ..call.shortcuts import know_triton
from ..host.compile_once import cached, digest, lock_of, locked, writable
from ..host.launch import RECORDED, Launch
from ..values.value import Unsupported
from .cross_compile import use_target
from .save import packed
from .warm import Call, Kernel


class Entry(NamedTuple):
    """A kernel with its key in Triton's cache."""

    name: str
    key: str
    compile: Callable[[], Any]


def launches(call: Call) -> list[Launch]:
    """Record the launches of a call: run its back end's forward and backward on tensors without memory."""
    p = call.problem
    x = Operands(*(meta_tensor(spec) for spec in p[1:4]), tuple(meta_tensor(spec) for spec in p.extra))  # type: ignore
    seed = torch.empty((), dtype=torch.int64, device="meta") if p.recipe.dropout else None
    found: list[Launch] = []
    token = RECORDED.set(found)
    try:
        saved = planned(p, FORWARD).run(x, seed)
        if call.wanted is not None:
            # with results in fp32, gradients.py passes delta on as a gradient of lse, and gives o in q's type
            of_lse = (None, saved.lse)[: 1 + call.lse] if p.out_dtype == p.dtype else (saved.lse,)
            p = p._replace(wanted=call.wanted, recipe=p.recipe.of_gradients())
            o = torch.empty(saved.o.shape, dtype=p.dtype, device="meta")  # empty_like imports SymPy
            saved, do = saved._replace(o=o), meta_tensor(TensorSpec.of(o)._replace(aligned=call.aligned))
            for dlse in of_lse:
                planned(p, BACKWARD).run(x, saved, do, dlse)
    finally:
        RECORDED.reset(token)
    return found


def meta_tensor(spec: TensorSpec) -> Tensor:
    """Return a meta tensor of this shape, these strides and this alignment."""
    reach = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    memory = torch.empty(max(0, reach) + 2, dtype=spec.dtype, device="meta")
    return memory.as_strided(spec.shape, spec.stride, 0 if spec.aligned else 1)


@lru_cache(256)
def kernels(call: Call) -> dict[str, Entry]:
    """Return the kernels of a call by their hashes; compile none."""
    found: dict[str, Entry] = {}
    name = ""

    def submit(key: str, compile: Callable[[], Any], *_: Any) -> None:
        found[digest(key)] = Entry(name, key, compile)

    recorder: Any = SimpleNamespace(submit=submit)  # in the place of Triton's AsyncCompileMode
    token = active_mode.set(recorder)
    try:
        for launch in launches(call):
            name = launch.kernel.fn.__name__
            launch.kernel.device_caches.clear()  # else Triton from 3.9 on would not call submit a second time
            launch.compile()
    finally:
        active_mode.reset(token)
    return found


def list_kernels(call: Call) -> tuple[list[Kernel], dict[str, dict[str, str]]]:
    """Return a call's kernels, and those of calls that differ from it (`Call.others`).

    The second result maps each difference to names of kernels by their hashes.
    """
    if not writable(folder := str(knobs.cache.dir)):
        raise OSError(f"Triton's cache {folder} cannot be written; set TRITON_CACHE_DIR to a folder that can")
    others: dict[str, dict[str, str]] = {}
    for what, other in call.others():
        with suppress(Unsupported):  # such a call is refused, so it compiles nothing
            others.setdefault(what, {}).update((hash, entry.name) for hash, entry in kernels(other).items())
    return [Kernel(entry.name, hash, cached(entry.key, entry.name)) for hash, entry in kernels(call).items()], others


def compile_one(call: Call, hash: str) -> float | None:
    """Compile one kernel of a call. Return the seconds it took, or None if another process was faster."""
    entry, begin = kernels(call)[hash], time.perf_counter()
    with locked(lock) if (lock := lock_of(entry.key)) else nullcontext():
        if cached(entry.key, entry.name):
            return None
        build_launcher(entry.compile())
    return time.perf_counter() - begin


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
    nvidia.CudaUtils()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


def pack(call: Call, hash: str) -> dict[str, bytes]:
    """Return the files of a compiled kernel, as a bundle has them."""
    entry = kernels(call)[hash]
    return packed(entry.key, entry.name, entry.compile)


REQUESTS: dict[str, Callable[..., Any]] = {"list_kernels": list_kernels, "compile": compile_one, "pack": pack}


def main(target: str) -> None:
    """Answer requests with (True, result) or (False, error message), until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the parent, which kills this process
    use_target(target)
    know_triton()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print to standard output, which carries answers here
    with suppress(EOFError):
        while True:
            name, arguments = pickle.load(sys.stdin.buffer)
            try:
                answer = True, REQUESTS[name](*arguments)
            except Exception as error:  # a compiler may raise anything
                answer = False, " ".join(f"{type(error).__name__}: {error}".split())[:2000]
            pickle.dump(answer, answers)
            answers.flush()
