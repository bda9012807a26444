"""A small machine: units that do one task at a time, and roles that start tasks and wait for them.

A role is a generator: it starts tasks, which run without it, and yields what it waits for, as the kernels' warps do.
The machine knows rates, and nothing of latencies or of instructions between tasks: what comes out is computed from
these rates, not measured.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

FLOPS = 4096
"""Of a multiprocessor's tensor cores in a cycle, in 16-bit types: 64 x 128 by 128 x 128 takes 512 cycles."""
EXPONENTIALS = 16
"""A cycle."""
ARITHMETIC = 128
"""Other fp32 operations a cycle."""
BYTES = 5120 / 132
"""From the second-level cache a cycle. An assumption: what an A100's cache gives, shared by 132 multiprocessors."""


def product(m: int, n: int, k: int) -> float:
    """Cycles of (m, k) by (k, n)."""
    return 2 * m * n * k / FLOPS


class Event:
    """Happens with the last of `arrivals`."""

    def __init__(self, name: str, arrivals: int) -> None:
        self.name, self.left = name, arrivals
        self.at: float | None = None
        self.waiting: list[Role] = []


Role = Iterator[Event]


class Span(NamedTuple):
    """A task, when it ran, and what had to be there before."""

    name: str
    unit: str
    group: int | None
    start: float
    end: float
    over: Event
    needs: tuple[Event, ...]


class Machine:
    """Time, events and units. A unit serves first who comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._events: dict[tuple[str, int | None], Event] = {}
        self._free: defaultdict[str, float] = defaultdict(float)
        self._ends: list[tuple[float, int, Event]] = []
        self._order = count()

    def event(self, name: str, group: int | None = None, arrivals: int = 1) -> Event:
        """The event of that name; a task's own is its end."""
        return self._events.setdefault((name, group), Event(name, arrivals))

    def start(
        self, unit: str, name: str, cycles: float, group: int | None = None, needs: Sequence[Event] = ()
    ) -> Event:
        """Queues a task; gives its end. What it needs must be there: to wait is the role's business."""
        missing = [event.name for event in needs if event.at is None]
        if missing:
            raise ValueError(f"{name} starts before {', '.join(missing)}: yield those first")
        over = self.event(name, group)
        if over.at is not None:
            raise ValueError(f"{name} was done before: a machine runs once, and a group's tasks have different names")
        begin = max(self.now, self._free[unit])
        end = self._free[unit] = begin + cycles
        self.spans.append(Span(name, unit, group, begin, end, over, tuple(needs)))
        heappush(self._ends, (end, next(self._order), over))
        return over

    def arrive(self, event: Event) -> None:
        """One arrival; the last one lets all go on that wait."""
        event.left -= 1
        if event.left == 0:
            event.at = self.now
            for role in event.waiting:
                self._resume(role)

    def run(self, *roles: Role) -> list[Span]:
        """Until every role is through."""
        for role in roles:
            self._resume(role)
        while self._ends:
            self.now, _, event = heappop(self._ends)
            self.arrive(event)
        stuck = [event.name for event in self._events.values() if event.at is None and event.waiting]
        if stuck:
            raise ValueError(f"these never happen, and a role waits for them: {', '.join(stuck)}")
        return self.spans

    def _resume(self, role: Role) -> None:
        for event in role:
            if event.at is None:
                event.waiting.append(role)
                return


def makespan(spans: Sequence[Span]) -> float:
    """When the last task is over."""
    return max(span.end for span in spans)


def busy(spans: Sequence[Span], unit: str) -> float:
    """The part of the makespan in which a unit works."""
    return sum(span.end - span.start for span in spans if span.unit == unit) / makespan(spans)
