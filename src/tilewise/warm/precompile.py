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

from triton import knobs
from triton.runtime._async_compile import active_mode

from ..call.shortcuts import know_triton
from ..host.ahead import build_launcher, recorded
from ..host.compile_once import cached, digest, lock_of, locked, writable
from ..host.launch import Launch
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
    """Return the launches of a call's forward, and of its gradient."""
    forward, gradient = recorded(call.problem, call.wanted, call.lse, call.aligned)
    return forward + gradient


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
