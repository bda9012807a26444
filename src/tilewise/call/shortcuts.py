"""Shorten a process's first call: find faster what Triton computes slowly on its way to a kernel that is cached."""

import inspect
import linecache
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

PACKAGE = str(__package__).rpartition(".")[0]
IMPORTING = threading.RLock()
FUNCTION = re.compile(r"(?P<margin>[ \t]*)(.*\n)*?(?P=margin)def .*\n((?P=margin)[ \t)\]}].*\n|[ \t]*\n)*")
"""Finds a function, up to a line that is indented no more than its first one, and closes no bracket."""


@contextmanager
def quick_sources() -> Iterator[None]:
    """Let Triton find the source of this package's device functions by `source_lines`, while they are imported.

    inspect.getsourcelines reads every token of a function in Python, which takes a third of a second for all.
    """
    from triton.runtime import jit

    with IMPORTING:
        if getattr(jit, "inspect", None) is not inspect:  # another release, or another thread of another copy
            yield
            return
        jit.inspect = SimpleNamespace(**vars(inspect) | {"getsourcelines": source_lines})  # type: ignore[assignment]
        try:
            yield
        finally:
            jit.inspect = inspect


def source_lines(fn: Any) -> tuple[list[str], int]:
    """Return what inspect.getsourcelines does, for this package's functions by their indentation."""
    code, ours = fn.__code__, fn.__module__.startswith(f"{PACKAGE}.")
    lines = linecache.getlines(code.co_filename, fn.__globals__) if ours else []
    found = FUNCTION.match("".join(lines[code.co_firstlineno - 1 :]))
    if not found:
        return inspect.getsourcelines(fn)
    return f"{found[0].rstrip()}\n".splitlines(keepends=True), code.co_firstlineno


def know_triton() -> None:
    """Give Triton the hash of its own files, 400 MB, if another process has kept it."""
    from triton.runtime import cache as keys

    slow: Any = getattr(keys, "triton_key", None)
    if not hasattr(slow, "cache_info") or slow.cache_info().currsize:  # it is known, or of another release
        return
    key = kept(f"triton-{stamp_of_triton()}", slow)
    keys.triton_key = lambda: key


def kept(name: str, slow: Callable[[], str]) -> str:
    """Return what a process has kept under a name, in Triton's cache; else what `slow` returns, and keep it. A cache
    that cannot be written keeps nothing."""
    from triton import knobs

    path = os.path.join(str(knobs.cache.dir), f"tilewise-{name}")
    with suppress(OSError), open(path) as file:
        if text := file.read():
            return text
    text = slow()
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        own = f"{path}.{os.getpid()}"
        with open(own, "w") as file:
            file.write(text)
        os.replace(own, path)
    return text


@cache
def stamp_of_triton() -> str:
    """Return Triton's version, and a hash of its files' sizes and times."""
    import triton

    walk = os.walk(os.path.dirname(triton.__file__))
    files = (os.path.join(folder, name) for folder, _, names in walk for name in names)
    code = sorted(path for path in files if path.endswith((".py", ".so", ".pyd")) and os.path.exists(path))
    stamps = [(at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for at in map(os.stat, code)]
    return f"{triton.__version__}-{sha256(repr((code, stamps)).encode()).hexdigest()}"
