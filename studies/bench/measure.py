"""Time, host cost and memory of a call."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from .. import environment
from .accuracy import Inputs
from .peers import Attention, Peer
from .suites import BACKWARD, FORWARD, Case

SAMPLE_SECONDS = 0.01
MOST_CALLS = 50
HOST_CALLS, HOST_ROUNDS = 50, 20
CYCLES_PER_SECOND = 2.0e9
"""Of a GPU's clock, at most: how long `torch.cuda._sleep` takes."""


class Pace(NamedTuple):
    """How many calls make a sample, and how long the host needs to queue them (seconds)."""

    calls: int
    lead: float


@contextmanager
def bound(peer: Peer, attend: Attention, x: Inputs, pass_: str) -> Iterator[Callable[[], Any]]:
    """Yield the call that a pass repeats. A backward runs again and again on the graph of one forward."""
    leaves = x.leaves
    with peer.context():
        if pass_ == FORWARD:
            yield lambda: attend(*leaves)
        elif pass_ == BACKWARD:
            o = attend(*leaves)
            yield lambda: torch.autograd.grad(o, leaves, x.do, retain_graph=True)
        else:
            yield lambda: torch.autograd.grad(attend(*leaves), leaves, x.do)


def pace(call: Callable[[], Any], device: torch.device) -> Pace:
    """Warm a call up, and find how often to repeat it."""
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    synchronize(device)
    whole = time.perf_counter() - start
    calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / whole)))
    return Pace(calls, 1.5 * calls * host)


def warm_up(call: Callable[[], Any], pace: Pace, device: torch.device, seconds: float) -> None:
    """Repeat a call for some seconds, so that a GPU whose power is limited comes to the clock that this call allows."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(pace.calls):
            call()
        synchronize(device)


def sample(call: Callable[[], Any], pace: Pace, device: torch.device) -> float:
    """Return the seconds of a call, from one measurement of queued calls.

    On a GPU the device waits while the host queues all calls, so that events around them see device time only.
    """
    if device.type == "cpu":
        call()  # after somebody else's, the caches are cold
        start = time.perf_counter()
        for _ in range(pace.calls):
            call()
        return (time.perf_counter() - start) / pace.calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(CYCLES_PER_SECOND * pace.lead))
    begin.record()
    for _ in range(pace.calls):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / pace.calls


def host_cost(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that the caller's thread spends on a call, launch included, after warm-up.

    The problem must be so small that the device never makes it wait. It is the least of many short rounds, because
    other processes can only add time.
    """
    for _ in range(HOST_CALLS // 2):
        call()
    rounds = []
    for _ in range(HOST_ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - start) / HOST_CALLS)
    synchronize(device)
    return min(rounds)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(samples: list[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile."""
    ordered = sorted(samples)
    if len(ordered) < 2:
        return ordered[0], ordered[0], ordered[0]
    fifths = statistics.quantiles(ordered, n=5, method="inclusive")
    return fifths[0], statistics.median(ordered), fifths[3]


def matmul(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """Return a call of the square product of random matrices, which shows a machine's present rate."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Return the peak of GPU memory, in bytes above what was allocated before the call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_memory_of_process(case: Case, peer: str, pass_: str) -> int:
    """Return the peak on a CPU: the growth of a new process's resident memory, in bytes."""
    request = json.dumps({"case": asdict(case), "peer": peer, "pass": pass_})
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.resident", request],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the process died")
    return int(done.stdout)


class Resident:
    """Growth of this process's resident memory since `Resident()`, at the worst moment."""

    def __init__(self) -> None:
        self.resettable = _reset_high_water()
        self.before = _now() if self.resettable else _high_water()

    def peak(self) -> int:
        """Return the growth, in bytes."""
        return max(0, _high_water() - self.before)


def _reset_high_water() -> bool:
    """Tell whether the peak of resident memory can be reset, as on Linux."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return _status("VmHWM") is not None


def _now() -> int:
    return _status("VmRSS") or 0


def _high_water() -> int:
    if (kibibytes := _status("VmHWM")) is not None:
        return kibibytes
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _status(key: str) -> int | None:
    """Return a line of /proc/self/status, in bytes; None where there is none."""
    if not os.path.exists("/proc/self/status"):
        return None
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
