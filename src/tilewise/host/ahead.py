"""python -m tilewise.host.ahead TARGET: compiles kernels of calls for a chip, which need not be here.

`warm` starts it, several times over: a process of its own, as Triton keeps what it knows of a chip for good. It reads
requests from standard input and answers each on standard output, both pickled.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime._async_compile import active_mode

from ..backend import select
from ..problem import Operands, Spec, Unsupported
from ..warm import Call, Kernel
from .elsewhere import use_target
from .launch import FORESEEN, Launch
from .once import cached, digest, lock_of, locked, writable


class Entry(NamedTuple):
    """A kernel as Triton's cache knows it."""

    name: str
    key: str
    compile: Callable[[], Any]


def launches(call: Call) -> list[Launch]:
    """What the call launches, by its back end's own forward and backward, on tensors without memory."""
    p = call.problem
    x = Operands(*(stand_in(spec) for spec in p[1:4]), tuple(stand_in(spec) for spec in p.extra))  # type: ignore
    seed = torch.empty((), dtype=torch.int64, device="meta") if p.recipe.dropout else None
    found: list[Launch] = []
    token = FORESEEN.set(found)
    try:
        backend = select(p)
        saved = backend.forward(p, x, seed)
        if call.wanted is not None:
            p = p._replace(wanted=call.wanted)
            do = stand_in(Spec.of(saved.o)._replace(aligned=call.aligned))
            for dlse in (None, saved.lse)[: 1 + call.lse]:
                backend.backward(p, x, saved, do, dlse)
    finally:
        FORESEEN.reset(token)
    return found


def stand_in(spec: Spec) -> Tensor:
    """A tensor of this shape, these strides and this alignment, without memory."""
    reach = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
    memory = torch.empty(max(0, reach) + 2, dtype=spec.dtype, device="meta")
    return memory.as_strided(spec.shape, spec.stride, 0 if spec.aligned else 1)


class Listing:
    """Keeps kernels that Triton wants compiled, and compiles none."""

    def __init__(self) -> None:
        self.found: dict[str, Entry] = {}

    def submit(self, key: str, compile: Callable[[], Any], *_: Any) -> None:
        self.found[digest(key)] = Entry(self.name, key, compile)

    def take(self, launch: Launch) -> None:
        """The kernel of a launch."""
        self.name = launch.kernel.fn.__name__
        launch.kernel.device_caches.clear()  # or Triton from 3.9 on would not ask a second time
        launch.compile()


@lru_cache(256)
def kernels(call: Call) -> dict[str, Entry]:
    """A call's kernels, by their hashes."""
    listing: Any = Listing()
    token = active_mode.set(listing)
    try:
        for launch in launches(call):
            listing.take(launch)
    finally:
        active_mode.reset(token)
    return listing.found


def foresee(call: Call) -> tuple[list[Kernel], dict[str, dict[str, str]]]:
    """A call's kernels; and those it would need if it differed in what nobody says ahead: names by hashes, by words."""
    if not writable(folder := str(knobs.cache.dir)):
        raise OSError(f"Triton's cache {folder} cannot be written; set TRITON_CACHE_DIR to a folder that can")
    others: dict[str, dict[str, str]] = {}
    for what, other in call.others():
        with suppress(Unsupported):  # refused then, not compiled
            others.setdefault(what, {}).update((hash, entry.name) for hash, entry in kernels(other).items())
    return [Kernel(entry.name, hash, there(entry)) for hash, entry in kernels(call).items()], others


def there(entry: Entry) -> bool:
    """Whether Triton's cache has it."""
    return cached(entry.key, entry.name)


def compile_one(call: Call, hash: str) -> float | None:
    """Compiles one kernel of a call; the seconds that it took, None if another process was faster."""
    entry, begin = kernels(call)[hash], time.perf_counter()
    with locked(lock) if (lock := lock_of(entry.key)) else nullcontext():
        if there(entry):
            return None
        build_launcher(entry.compile())
    return time.perf_counter() - begin


def build_launcher(kernel: Any) -> None:
    """What launches a kernel, where Triton (3.6) has a C compiler build it and the driver is here to link with."""
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


REQUESTS: dict[str, Callable[..., Any]] = {"foresee": foresee, "compile": compile_one}


def requests(source: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Until there are no more."""
    with suppress(EOFError):
        while True:
            yield pickle.load(source)


def main(target: str) -> None:
    """Answers requests with (True, result) or (False, what went wrong)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends this process, too
    use_target(target)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print is no answer
    for name, arguments in requests(sys.stdin.buffer):
        try:
            answer = True, REQUESTS[name](*arguments)
        except Exception as error:  # whatever a compiler raises
            answer = False, " ".join(f"{type(error).__name__}: {error}".split())[:2000]
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
