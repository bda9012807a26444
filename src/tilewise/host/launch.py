"""Launch: a kernel with its arguments, to run or to compile. The device and stream that it runs on."""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from .compile_once import compile_once, hash_in_order
from .direct import direct

FUSED = {"enable_fp_fusion": True}
"""A compiler option of every kernel: a product and a sum may become one multiply-add. Triton 3.10 no longer fuses them
by default, which changes results and times."""

NO_CONTEXT = nullcontext()
"""A context that does nothing, made once because every call enters it."""


def on_device(q: Tensor) -> AbstractContextManager[Any]:
    """Return a context that makes q's device current, as Triton launches there. It is free if that is so already."""
    if not q.is_cuda or q.device.index == torch._C._cuda_getDevice():
        return NO_CONTEXT
    return torch.cuda.device(q.device)


def current_stream(device: torch.device) -> int | None:
    """Return the handle of a GPU's current stream; None for another device."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


@lru_cache(64)
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; an H200's, where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def profiled() -> bool:
    """Tell whether a profiler has set launch hooks."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", True) or getattr(leave, "calls", True))  # a single hook has no `calls`


class Launch(NamedTuple):
    """A kernel with its arguments, ready to run, or to compile for a chip that is not installed."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: dict[Any, Any]
    """The problem's cache of compiled kernels, by kernel and `key`. Triton's own look-up takes longer than the rest of
    a call. All that it looks at follows from the problem, except what `key` holds."""
    key: Any = None

    def run(self, stream: int | None = None) -> None:
        """Launch the kernel on the current stream, unless it has no programs. `stream`, its handle, saves a look-up."""
        if not self.programs:
            return
        at = self.kernel.fn, self.key  # Triton's own objects are slow to hash
        if at not in self.compiled:
            self.run_first(at)
            return
        compiled, rest, at_once = self.compiled[at]
        if stream is None or profiled():
            compiled[(self.programs, 1, 1)](*self.arguments, *rest, stream=stream)
        elif at_once:
            at_once(self.programs, stream, self.arguments)
        else:  # the same without hooks: Triton prepares their arguments even if none is set
            compiled.run(
                self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *self.arguments, *rest,
            )  # fmt: skip

    def run_first(self, at: Any) -> None:
        """Compile the kernel or load it from Triton's cache, and run it; with a list in RECORDED, append it there."""
        if (foreseen := RECORDED.get()) is not None:
            foreseen.append(self)
            return
        if not knobs.runtime.interpret:
            hash_in_order(self.kernel, self.arguments)
        start = self.kernel[(self.programs,)]
        compiled = compile_once(self.kernel.fn.__name__, lambda: start(*self.arguments, **FUSED | self.constants))
        if compiled is not None:  # the interpreter compiles nothing
            rest = tuple([self.constants[name] for name in self.kernel.arg_names[len(self.arguments) :]])
            self.compiled[at] = compiled, rest, direct(compiled, self.arguments, rest)

    def compile(self) -> Any:
        """Compile the kernel for the active driver's target, without a GPU."""
        hash_in_order(self.kernel, self.arguments)
        return self.kernel.warmup(*self.arguments, grid=(1,), **FUSED | self.constants)


RECORDED: ContextVar[list[Launch] | None] = ContextVar("foreseen", default=None)
"""A list that records launches of kernels that are not compiled, in place of running them; None runs them. A back end
called on meta tensors thus records what the same call launches on a GPU (see precompile.py)."""
