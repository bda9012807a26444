"""Compile a kernel once: processes of a node share it by file locks, and by keys that do not depend on their past.

Each process locks a file in Triton's cache. The system releases the lock when its holder exits. No process waits longer
than LOCK_TIMEOUT, or where files cannot be locked. Then two may compile the same kernel.
"""

import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from hashlib import sha256
from opcode import EXTENDED_ARG, opmap
from types import CodeType
from typing import Any, TypeVar

from triton import knobs
from triton.language import constexpr
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager

from ..call.backend import COMPILING
from ..call.shortcuts import kept, know_triton, stamp_of_triton
from .bundle import unpack

try:
    import fcntl
except ImportError:  # on Windows, without locks
    fcntl = None

LOCK_TIMEOUT = 120.0
"""Seconds that a process waits for another's lock; then it compiles the kernel itself."""
LOCK_POLL = 0.02
"""Seconds between two attempts to lock."""
LOAD_GLOBAL = opmap["LOAD_GLOBAL"]
HASHING = threading.RLock()
"""Held while functions are hashed: another thread would take one that is half done for hashed."""

Result = TypeVar("Result")


def compile_once(name: str, start: Callable[[], Result]) -> Result:
    """Call `start`, which launches the kernel of that name, and compiles it if Triton's cache lacks it.

    If the cache is not writable, warn, and use a temporary folder for this process.
    """
    folder = str(knobs.cache.dir)
    try:
        return _call_locked(name, start)
    except OSError as error:
        if writable(folder):
            raise
        if folder == knobs.cache.dir:  # else another thread has changed it already
            _use_temporary_cache(folder, error)
        return _call_locked(name, start)


def _call_locked(name: str, start: Callable[[], Result]) -> Result:
    know_triton()
    if active_mode.get() is not None:  # the caller uses triton.AsyncCompileMode
        return start()
    with ExitStack() as held:  # hold the lock until the kernel has run, as its first run also builds its launcher
        held.callback(active_mode.reset, active_mode.set(_LockedCompiler(name, held)))  # type: ignore[arg-type]
        return start()


class _LockedCompiler:
    """Triton submits a kernel here that this process has not loaded, as it would to its AsyncCompileMode."""

    def __init__(self, name: str, held: ExitStack) -> None:
        self.name, self.held = name, held

    def submit(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], None], *_: Any) -> Any:
        """Return the kernel, from the cache, or under the lock from a bundle or compiled."""
        if not knobs.compilation.always_compile and not cached(key, self.name):
            if lock := lock_of(key):
                self.held.enter_context(locked(lock))
            if not cached(key, self.name):  # by the process that held the lock
                if start := COMPILING.get():
                    COMPILING.set(None)
                    start()
                unpack(key, self.name, compile)
        kernel = compile()
        finalize(kernel)
        return kernel


def cached(key: str, name: str) -> bool:
    """Tell whether Triton's cache has the kernel of that name under a key."""
    return get_cache_manager(digest(key)).get_group(f"{name[:150]}.json") is not None  # Triton writes this file last


def lock_of(key: str) -> str | None:
    """Return the file to lock before compiling: Triton's file cache names one per kernel, and does not use it."""
    return getattr(get_cache_manager(digest(key)), "lock_path", None)


def digest(key: str) -> str:
    """Return the folder name that Triton's cache makes of a key."""
    return sha256(key.encode("utf-8")).hexdigest()


def hash_in_order(*values: Any) -> None:
    """Hash device functions, and those in tuples, each after all that it calls.

    A caller's hash holds the constants of its callees only if Triton hashed these before. Without an order, a kernel's
    key in Triton's cache depends on what the process compiled earlier, and another process compiles the kernel again.
    Later processes find the hashes kept, as Triton parses functions for them.
    """
    with HASHING:
        if all([fn.hash for fn in _functions(values)]):
            return
        functions = [*reached(values, {}).values()]
        text = kept(f"hashes-{_key(functions)}", lambda: _hashed(functions))
        for fn, (hash, used) in zip(functions, json.loads(text), strict=True):
            if fn.hash is None and None not in [n for _, n in used]:
                scopes = [(name, functions[n].__globals__) for name, n in used]
                fn.used_global_vals = {(name, id(scope)): (scope[name], scope) for name, scope in scopes}
                fn.hash = hash
            fn.cache_key  # noqa: B018, it computes what is not kept


def reached(values: Iterable[Any], found: dict[int, Any]) -> dict[int, Any]:
    """Add to `found`, by id, device functions, and before each all that it calls."""
    for fn in _functions(values):
        if id(fn) not in found:
            reached([other for other in _named(fn) if other is not fn], found)
            found[id(fn)] = fn
    return found


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the device functions among values, also those in tuples and aggregates."""
    for value in values:
        if isinstance(value, tuple):
            yield from _functions(value)
        elif hasattr(value, "hash_attrs"):  # an aggregate
            yield from _functions(value.hash_attrs)
        elif hasattr(type(value), "cache_key"):
            yield value


def _named(fn: Any) -> list[Any]:
    """Return what a function loads from its module."""
    return [fn.__globals__.get(name) for name in _globals_of(fn.fn.__code__)]


def _key(functions: list[Any]) -> str:
    """Hash all that hashes of functions follow from: their sources, where these are, constants, and classes."""
    digest = sha256(stamp_of_triton().encode())
    for fn in functions:
        facts = [
            (str(x), str(getattr(x, "__annotations__", 0))) for x in _named(fn) if isinstance(x, (constexpr, type))
        ]
        of = fn.__module__, fn.__qualname__, fn.starting_line_number, fn.src, getattr(fn, "noinline", None)
        digest.update(repr((of, facts)).encode())
    return digest.hexdigest()


def _hashed(functions: list[Any]) -> str:
    """Return Triton's hashes of functions, each with the names that it checks in every launch, and for each name the
    number of a function of the same module, or None."""
    at = {id(fn.__globals__): n for n, fn in enumerate(functions)}
    return json.dumps([(fn.cache_key, [(name, at.get(of)) for name, of in fn.used_global_vals]) for fn in functions])


@lru_cache(4096)
def _globals_of(code: CodeType) -> list[str]:
    """Return the names that a function's code loads from its module. For all device functions of a first step it takes
    10 ms; with the `dis` module it takes 77."""
    names, argument = set[str](), 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = argument << 8 | low
        if operation == LOAD_GLOBAL:
            names.add(code.co_names[argument >> (sys.version_info >= (3, 11))])  # its last bit is a flag of calls
        if operation != EXTENDED_ARG:
            argument = 0
    return sorted(names.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, CodeType))))


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock of a file, or go on without it after LOCK_TIMEOUT."""
    try:
        file = open(path, "a")  # noqa: SIM115, closed below
    except OSError:  # the compilation that follows raises the reason
        yield
        return
    with file:
        end = time.monotonic() + LOCK_TIMEOUT
        while not _try_lock(file) and time.monotonic() < end:
            time.sleep(LOCK_POLL)
        try:
            yield
        finally:
            _release(file)


def _try_lock(file: Any) -> bool:
    """Try to lock. Return True if it worked, or if files cannot be locked here."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _release(file: Any) -> None:
    """Release the lock. Closing the file is not enough: a process forked meanwhile has it open, too."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:  # a file system without locks
        pass


def writable(folder: str) -> bool:
    """Tell whether this process can create files in the folder."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


TEMPORARY_CACHE: list[tempfile.TemporaryDirectory[str]] = []
"""The temporary folder that replaces a cache that is not writable; it is deleted when the process ends."""


def _use_temporary_cache(folder: str, error: OSError) -> None:
    TEMPORARY_CACHE.append(tempfile.TemporaryDirectory(prefix="tilewise-kernels-"))
    knobs.cache.dir = TEMPORARY_CACHE[-1].name
    warnings.warn(
        f"Triton's cache {folder} cannot be written ({error}), so this process compiles every kernel for itself; "
        "set TRITON_CACHE_DIR to a folder that can",
        RuntimeWarning,
        stacklevel=2,
    )
