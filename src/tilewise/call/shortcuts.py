"""Shorten a process's first call: find faster what Triton computes slowly on its way to a kernel that is cached."""

import inspect
import linecache
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

PACKAGE = str(__package__).rpartition(".")[0]
IMPORTING = threading.RLock()


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
    code, package = fn.__code__, f"{PACKAGE}."
    lines = linecache.getlines(code.co_filename, fn.__globals__) if fn.__module__.startswith(package) else []
    if not lines:
        return inspect.getsourcelines(fn)
    return _function(lines[code.co_firstlineno - 1 :]), code.co_firstlineno


def _function(lines: list[str]) -> list[str]:
    """Return the lines of the function that they begin with. It ends before one that is indented no more than its first
    line, and closes no bracket."""
    margin = lines[0][: -len(lines[0].lstrip())]
    inside = re.compile(rf"\s*$|{margin}[\s)\]}}]").match
    begin = next(n for n, line in enumerate(lines) if line.lstrip().startswith("def ")) + 1
    end = next((n for n in range(begin, len(lines)) if not inside(lines[n])), len(lines))
    while lines[end - 1].isspace():
        end -= 1
    return lines[:end]


def know_triton() -> None:
    """Give Triton the hash of its own files, if an earlier process has kept it, or keep it for later ones.

    A process would compute it from 400 MB. It is kept in Triton's cache, in a file named after the sizes and times of
    all that Triton reads for it. A cache that cannot be written keeps nothing.
    """
    from triton import __version__, knobs
    from triton.runtime import cache

    slow: Any = getattr(cache, "triton_key", None)
    if not hasattr(slow, "cache_info") or slow.cache_info().currsize:  # it is known, or of another release
        return
    with suppress(OSError):
        kept = os.path.join(str(knobs.cache.dir), f"tilewise-triton-{_stamp(os.path.dirname(cache.__file__))}")
        with suppress(OSError), open(kept) as file:
            key = file.read()
            if key.startswith(__version__):
                cache.triton_key = lambda: key
                return
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        own = f"{kept}.{os.getpid()}"
        with open(own, "w") as file:
            file.write(slow())
        os.replace(own, kept)


def _stamp(runtime: str) -> str:
    """Hash names, sizes and times of the files that Triton's own hash covers."""
    root = os.path.dirname(runtime)
    folders = [os.path.join(root, name) for name in ("compiler", "backends", "language")]
    library = os.path.join(root, "_C")
    found = [os.path.join(runtime, "cache.py"), *(os.path.join(library, name) for name in os.listdir(library))]
    for folder, _, names in (at for top in folders for at in os.walk(top)):
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    seen = ((path, os.stat(path)) for path in sorted(found))
    stamps = [(path, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for path, at in seen]
    return sha256(repr(stamps).encode()).hexdigest()
