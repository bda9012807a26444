"""A model of what plans cost, forward and backward of one layer: of H200s, two of which were measured, or of a cluster
that is fitted to other rows of studies/bench/parallel.py."""

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

VARIABLE = "TILEWISE_CLUSTER"
DEFAULT_SOURCE = "what two H200s did; between nodes by guesses"
"""Where the default cluster's numbers come from."""
ADDED = 16
"""Bytes that each number of a part's o and dq costs: it is written in fp32, read, and added to a sum."""


class Cluster(NamedTuple):
    """What the model assumes of GPUs and links, by default H200s with NVLink in nodes of 8, and 400 Gb/s between them.

    Rates, link and beside are fitted to two H200s (`fit`); all else is guessed.
    """

    forward: float = 680e12
    """FLOP/s of long rows, forward; then backward."""
    backward: float = 590e12
    link: float = 88e9
    """Bytes/s a GPU and direction inside a node, with all that goes before and after a message; then between nodes."""
    network: float = 42e9
    memory: float = 4.0e12
    """Bytes/s of a GPU's memory."""
    node: int = 8
    start: float = 20e-6
    """Seconds that a message takes to start inside a node; then between nodes; then those of a launch."""
    network_start: float = 40e-6
    launch: float = 15e-6
    beside: float = 1.0
    """What kernels beside a message lose, as a part of the time that it takes inside a node."""


class Sizes(NamedTuple):
    """A problem's sizes: the whole's rows, ranks, heads, head size, and bytes of a number."""

    N: int
    ranks: int
    H: int
    H_k: int
    D: int
    itemsize: int = 2
    visible: float = 0.5
    """The part of P that the mask shows, and that is computed."""
    fetched: float = 0.75
    """The part of the others' keys that a rank needs, the mean over ranks."""
    most: float = 1.0
    """The most that a rank needs of the others' keys."""
    calls: int = 2
    """In which a rank computes its rows, where all their keys are there at once."""
    balance: float = 1.0
    """The most work of a rank, of the mean, where each computes its own rows."""


class Cost(NamedTuple):
    """Seconds of forward and backward, those in which nothing is computed, bytes that a rank receives, and those it
    holds beside what one device holds for its share of the work."""

    seconds: float
    exposed: float
    received: float
    memory: float


def cost(plan: str, inner: int, x: Sizes, c: Cluster = Cluster()) -> Cost:  # noqa: B008, a value
    """Return the cost of a plan by name; with inner > 1, of "ring" over Ulysses in groups of `inner`."""
    U = x.ranks if plan == "ulysses" else inner
    R = x.ranks // U
    h, h_k = x.H // U, max(1, x.H_k // U)
    rows = max(1, x.N // R)  # no length is refused for its cost
    flops = 4.0 * x.visible * x.N * x.N * x.H * x.D / x.ranks
    swap, swapped = _swap(x, U, h_k, c) if U > 1 else (0.0, 0.0)
    held = rows * (3.0 * h + 2 * h_k) * x.D * x.itemsize if U > 1 else 0.0  # q, o and do, k and v by heads
    if R == 1:
        seconds = flops / _rate(c.forward, x.N) + 2.5 * flops / _rate(c.backward, x.N)
        return Cost(seconds + swap, swap, swapped, held)
    speed, start = (c.link, c.start) if x.ranks <= c.node else (c.network, c.network_start)
    keys = rows * 2.0 * h_k * x.D * x.itemsize
    sums = rows * 2.0 * h_k * x.D * 4
    part = {"ring": x.fetched, "gather": 1.0, "halo": x.most}[plan]  # of the others' keys
    seconds = exposed = swap
    for peak, scale, size in ((c.forward, 1.0, keys), (c.backward, 2.5, keys + sums)):
        work = scale * flops * x.balance / _rate(peak, rows / (x.calls if plan == "halo" else 2))
        if plan == "ring":
            parts = (1 + x.most * (R - 1)) / R  # the mean share of rows in a part, about that of the keys they see
            step = work / R + 2 * c.launch + ADDED * parts * rows * h * x.D / c.memory
            talk = part * size / speed + start
            seconds += step + (R - 1) * max(step + c.beside * part * size / c.link, talk)
            exposed += (R - 1) * max(0.0, talk - step)
        else:
            talk = part * (R - 1) * size / speed + start * R**0.5
            seconds, exposed = seconds + work + c.launch + talk, exposed + talk
    received = swapped + part * (R - 1) * (2 * keys + sums)
    buffer, own = 1 + part * (R - 1), 4.0 * rows * h * x.D  # own keys, too; rows of q in fp32
    held += {
        "ring": 2 * keys + 3 * own,  # o and dq, twice
        "gather": R * (keys + 2 * sums) + 3 * own,
        "halo": buffer * (keys + 3 * sums) + 2 * own,  # gradients, and messages of them both ways
    }[plan]
    return Cost(seconds, exposed, received, held)


def _swap(x: Sizes, U: int, h_k: int, c: Cluster) -> tuple[float, float]:
    """Return the seconds and bytes of Ulysses' exchanges, two each way."""
    inside = c.node >= U
    speed, start = (c.link, c.start) if inside else (c.network, c.network_start)
    each = x.N / x.ranks * (2 * x.H + 2 * h_k * U) * x.D * x.itemsize * (U - 1) / U
    across = 1.0 if inside else (U - c.node) / (U - 1)
    return 2 * (each / speed * across + 4 * start) + 4 * each / c.memory, 2 * each


def _rate(peak: float, rows: float) -> float:
    """Return FLOP/s for calls of so many rows."""
    return peak * max(1.0, rows) / (rows + 500.0)


def fit(rows: Iterable[Mapping[str, Any]], cluster: Cluster = Cluster()) -> Cluster:  # noqa: B008, a value
    """Return the cluster whose costs come closest to measured ones, by the mean square of their logarithms.

    Rates follow from one GPU with its share of the work; then the link, and what kernels beside messages lose, from
    plans over that, as the rounds of the two alternated: a GPU whose clock changes from row to row slows both.

    Args:
        rows: those of studies/bench/parallel.py with a causal mask; others are left out.
        cluster: what is fitted, its link by at most a factor of 256. What one node cannot show stays as it is.

    Raises:
        ValueError: no row is left.
    """
    of_model = [
        (row["plan"], Sizes(row["tokens"], row["gpus"], H, H_k, 128), row["milliseconds_of_share"], row["milliseconds"])
        for row in rows
        if row.get("mask") == "causal" and row["gpus"] > 1
        for H, H_k in [row["heads"]]
    ]
    if not of_model:
        raise ValueError(
            "fit: rows must hold calls with a causal mask on several GPUs, got none; run studies.bench.parallel"
        )

    def of_share(x: Sizes, c: Cluster) -> float:
        return cost("ulysses", 1, x._replace(ranks=1, H=x.H // x.ranks, H_k=max(1, x.H_k // x.ranks)), c).seconds

    def error(c: Cluster) -> float:
        return sum(
            log(cost(plan, 1, x, c).seconds / of_share(x, c) * share / taken) ** 2 for plan, x, share, taken in of_model
        )

    faster = fmean([log(of_share(x, cluster) * 1e3 / share) for _, x, share, _ in of_model])  # its time is all rates'
    cluster = cluster._replace(forward=cluster.forward * exp(faster), backward=cluster.backward * exp(faster))
    tried = product(range(-160, 161), range(11))
    return min((cluster._replace(link=cluster.link * 2 ** (n / 20), beside=part / 10) for n, part in tried), key=error)


def current() -> Cluster:
    """Return the cluster of the file that TILEWISE_CLUSTER names, the same on all ranks; else the default one."""
    path = os.environ.get(VARIABLE)
    return _read(path) if path else Cluster()


@lru_cache(8)
def _read(path: str) -> Cluster:
    try:
        found = {name: float(number) for name, number in json.loads(Path(path).read_text()).items()}
        return Cluster()._replace(**found)._replace(node=int(found.get("node", Cluster().node)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{VARIABLE} must name a JSON file with numbers of {', '.join(Cluster._fields)}, got {path} ({error}); "
            "write it with `python -m studies.bench.parallel --fit`, or unset it"
        ) from None
