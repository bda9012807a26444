"""Count calls of attention by the back end that ran them, and those that fell back to PyTorch by reason."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock


@dataclass(eq=False)
class Calls:
    """Hold the counts of calls. `str` gives them in one line.

    `ran` maps the name of a back end to its number of calls. `fell_back` maps a reason to the number of calls that
    tilewise.compat.sdpa left to PyTorch for it.
    """

    ran: Counter[str] = field(default_factory=Counter)
    fell_back: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        """Return the number of all calls."""
        return self.ran.total() + self.fell_back.total()

    def __str__(self) -> str:
        return f"ran {_in_words(self.ran)}; {_in_words(self.fell_back, ' fell back to PyTorch')}"

    @property
    def handed_back(self) -> Counter[str]:
        """Return `fell_back`, under its earlier name, which works for one release."""
        warnings.warn("Calls: handed_back is called fell_back, and will not work in the next release", FutureWarning, 2)
        return self.fell_back


COUNTING: list[Calls] = []
"""The counts of every open `count_calls`; empty, and then nothing is counted."""
_lock = Lock()


@contextmanager
def count_calls() -> Iterator[Calls]:
    """Count the calls of attention in all threads, inside a `with`.

    A call is one forward, by any function of this package or through tilewise.compat.sdpa. A forward that checkpointing
    repeats counts again, and gradients do not count. Compiled code counts what runs each time it runs, but what
    falls back only once, when it is traced.

    Returns:
        a context manager, which gives a Calls with `.ran` and `.fell_back`; print it to see a line.
    """
    calls = Calls()
    with _lock:
        COUNTING.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            COUNTING.remove(calls)


def count_ran(backend: str) -> None:
    """Count a call that a back end runs. Ask `COUNTING` first, so that nothing is done where nobody counts."""
    with _lock:
        for calls in COUNTING:
            calls.ran[backend] += 1


def count_fell_back(reason: str) -> None:
    """Count a call that is left to PyTorch. Ask `COUNTING` first."""
    with _lock:
        for calls in COUNTING:
            calls.fell_back[reason] += 1


def _in_words(counts: Counter[str], what: str = "") -> str:
    """Return "12 calls (hopper: 8, triton: 4)", with what they did behind "calls"."""
    number = counts.total()
    each = ", ".join(f"{name}: {count}" for name, count in counts.most_common())
    return f"{number} call{'' if number == 1 else 's'}{what}{f' ({each})' if each else ''}"
