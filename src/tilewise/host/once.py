"""A kernel that Triton's cache lacks is compiled once, however many processes ask for it together: ranks of a node do.

They take turns by a lock on a file, which the system releases when its holder ends, however it ends. Nobody waits for
longer than PATIENCE, nor where files cannot be locked; then two processes may compile the same.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any, TypeVar

from triton import knobs
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager

try:
    import fcntl
except ImportError:  # Windows, where nobody waits
    fcntl = None

PATIENCE = 120.0
"""Seconds after which a process compiles what another seems to be compiling still."""
PAUSE = 0.02
"""Seconds between two looks at a lock."""

Result = TypeVar("Result")


def once(name: str, start: Callable[[], Result]) -> Result:
    """`start()`, which compiles the kernel of that name if Triton's cache lacks it, and launches it.

    A cache that cannot be written holds nobody up: this process takes a folder of its own, and warns.
    """
    folder = str(knobs.cache.dir)
    try:
        return _in_turn(name, start)
    except OSError as error:
        if writable(folder):
            raise
        if folder == knobs.cache.dir:  # else another thread was here
            _take_own_folder(folder, error)
        return _in_turn(name, start)


def _in_turn(name: str, start: Callable[[], Result]) -> Result:
    if active_mode.get() is not None:  # the caller's own triton.AsyncCompileMode
        return start()
    with ExitStack() as held:  # until the kernel has started: the first start builds what launches it, too
        held.callback(active_mode.reset, active_mode.set(_Turn(name, held)))  # type: ignore[arg-type]
        return start()


class _Turn:
    """What Triton hands a kernel to that is not in this process yet, in place of its AsyncCompileMode."""

    def __init__(self, name: str, held: ExitStack) -> None:
        self.name, self.held = name, held

    def submit(self, key: str, compile: Callable[[], Any], finalize: Callable[[Any], None], *_: Any) -> Any:
        """The kernel, from the cache or compiled under the lock."""
        lock = lock_of(key)
        if lock and not knobs.compilation.always_compile and not cached(key, self.name):
            self.held.enter_context(locked(lock))
        kernel = compile()
        finalize(kernel)
        return kernel


def cached(key: str, name: str) -> bool:
    """Whether Triton's cache has the kernel of that name under a key."""
    return get_cache_manager(digest(key)).get_group(f"{name[:150]}.json") is not None  # written last


def lock_of(key: str) -> str | None:
    """The file to lock before compiling: Triton's cache in files names one for each kernel, and leaves it unused."""
    return getattr(get_cache_manager(digest(key)), "lock_path", None)


def digest(key: str) -> str:
    """A key of Triton's, as its cache names folders by it."""
    return sha256(key.encode("utf-8")).hexdigest()


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Holds the lock of a file, if it can be had in time."""
    try:
        file = open(path, "a")  # noqa: SIM115, closed below
    except OSError:  # what follows says why
        yield
        return
    with file:
        end = time.monotonic() + PATIENCE
        while not _taken(file) and time.monotonic() < end:
            time.sleep(PAUSE)
        try:
            yield
        finally:
            _release(file)


def _taken(file: Any) -> bool:
    """Whether this process has the lock now, or there are no locks."""
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
    """Closing would not do: a process that was forked meanwhile has the file open, too."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_UN)
    except OSError:  # a file system without locks
        pass


def writable(folder: str) -> bool:
    """Whether files can be made there."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


OWN: list[tempfile.TemporaryDirectory[str]] = []
"""What stands in for a cache that cannot be written; it goes when the process ends."""


def _take_own_folder(folder: str, error: OSError) -> None:
    OWN.append(tempfile.TemporaryDirectory(prefix="tilewise-kernels-"))
    knobs.cache.dir = OWN[-1].name
    warnings.warn(
        f"Triton's cache {folder} cannot be written ({error}), so this process compiles every kernel for itself; "
        "set TRITON_CACHE_DIR to a folder that can",
        RuntimeWarning,
        stacklevel=2,
    )
