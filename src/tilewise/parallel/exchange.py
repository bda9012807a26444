"""Messages between the ranks of a group, over torch.distributed; and how many bytes they carry."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from hashlib import sha256
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Axes = tuple[Any, ...]
"""The process groups of a mesh's dimensions, the outer first; of a group, the group alone."""

ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Torch 2.13 gave these other names."""

SENT: ContextVar[Counter | None] = ContextVar("sent", default=None)
"""The bytes that this rank sends, by the rank of the group that gets them; None counts nothing."""


@contextmanager
def count_bytes() -> Iterator[Counter]:
    """Count the bytes that this rank sends inside, by the rank (in its group) that gets them."""
    counter: Counter = Counter()
    token = SENT.set(counter)
    try:
        yield counter
    finally:
        SENT.reset(token)


def count(messages: Iterable[tuple[int, Tensor]], own: int) -> None:
    """Add messages, by the rank that gets them, to the counter, if there is one; but for this rank's own."""
    if torch.compiler.is_compiling() or (counter := SENT.get()) is None:
        return
    for to, tensor in messages:
        if to != own:
            counter[to] += tensor.numel() * tensor.element_size()


def size_of(axes: Axes) -> int:
    """Return how many ranks there are."""
    return prod([dist.get_world_size(axis) for axis in axes])


def rank_of(axes: Axes) -> int:
    """Return this process's place, the inner dimension fastest."""
    rank = 0
    for axis in axes:
        rank = rank * dist.get_world_size(axis) + dist.get_rank(axis)
    return rank


@contextmanager
def answered() -> Iterator[None]:
    """Say in a sentence that a rank is gone, where an error of torch.distributed ends a wait."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):  # which raises errors of no class
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(
            f"a rank of the group does not answer any more ({first}); run again from the last checkpoint"
        ) from error


def gathered(fact: Any, axes: Axes) -> list[Any]:
    """Return what every rank says, in the order of ranks."""
    facts = [fact]
    for axis in reversed(axes):
        every: list[Any] = [None] * dist.get_world_size(axis)
        with answered():
            dist.all_gather_object(every, facts, group=axis)
        facts = [one for part in every for one in part]
    return facts


def home_of(axes: Axes, near: Any) -> torch.device:
    """Return where small messages of groups live: on the host where it can send, which then waits for no kernel.

    near: a tensor, on whose GPU they live elsewhere; anything else means the current one.
    """
    kinds = [one.partition(":")[0] for one in dist.get_backend_config(axes[0]).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    own = isinstance(near, Tensor) and near.device.type in kinds
    return near.device if own else torch.empty(0, device=kinds[0]).device


def alike(fact: str, axes: Axes, home: torch.device) -> bool:
    """Tell on every rank whether all say the same, by one exchange of 16 bytes a dimension."""
    digest = int.from_bytes(sha256(fact.encode()).digest()[:7], "big")
    beside = torch.cuda.stream(torch.cuda.Stream(home)) if home.type == "cuda" else nullcontext()
    with beside:  # the host waits for earlier messages, and not for kernels that wait for them
        largest = torch.tensor((digest, -digest), device=home)  # of digests, and of their opposites
        for axis in axes:
            with answered():
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis)
        first, opposite = largest.tolist()
    return first == -opposite


def gather(x: Tensor, axes: Axes) -> Tensor:
    """Return the tensors of all ranks, (P, *x.shape)."""
    found = x.contiguous()[None]
    for axis in reversed(axes):
        every = found.new_empty((dist.get_world_size(axis) * found.shape[0], *found.shape[1:]))
        with answered():
            ALL_GATHER(every, found, group=axis)
        found = every
    count(enumerate(found), rank_of(axes))
    return found


def scatter_sum(x: Tensor, axes: Axes) -> Tensor:
    """Return the sum over ranks of the part of x (P, ...) that is this rank's."""
    count(enumerate(x), rank_of(axes))
    for axis in axes:
        part = x.new_empty((x.shape[0] // dist.get_world_size(axis), *x.shape[1:]))
        with answered():
            REDUCE_SCATTER(part, x.contiguous(), group=axis)
        x = part
    return x[0]


def swap(x: Tensor, sent: list[int], received: list[int], axis: Any) -> Tensor:
    """Send the next `sent[u]` rows of x to rank u; return those of each rank in order, `received[u]` of them."""
    got = x.new_empty((sum(received), *x.shape[1:]))
    count(enumerate(x.split(sent)), dist.get_rank(axis))
    with answered():
        dist.all_to_all_single(got, x.contiguous(), received, sent, group=axis)
    return got


class Message:
    """What is on its way to one rank and from another; None or an empty tensor is no message."""

    def __init__(self, axis: Any, out: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        operations = []
        for run, tensor, peer in ((dist.isend, out, to), (dist.irecv, into, source)):
            if tensor is not None and tensor.numel():
                at = peer if axis is None else dist.get_global_rank(axis, peer)
                operations.append(dist.P2POp(run, tensor, at, axis))
        if out is not None:
            count([(to, out)], dist.get_rank(axis))
        self.sent, self.into = out, into  # both stay alive until they are there
        with answered():
            self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """Return what was received."""
        with answered():
            for work in self.works:
                work.wait()
        self.sent = None
        return self.into
