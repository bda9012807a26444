"""Messages between the ranks of a group, over torch.distributed; and how many bytes they carry."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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


def count(to: int, tensor: Tensor) -> None:
    """Add a message to the counter, if there is one."""
    if not torch.compiler.is_compiling() and (counter := SENT.get()) is not None:
        counter[to] += tensor.numel() * tensor.element_size()


def axes_of(group: Any) -> Axes:
    """Return the groups of a ProcessGroup's or a DeviceMesh's dimensions."""
    if not isinstance(group, DeviceMesh):
        return (group,)
    return tuple([group.get_group(n) for n in range(group.ndim)])


def size_of(axes: Axes) -> int:
    """Return how many ranks there are."""
    size = 1
    for axis in axes:
        size *= dist.get_world_size(axis)
    return size


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


def told(fact: Any, axes: Axes) -> list[Any]:
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
    found, mine = x.contiguous()[None], rank_of(axes)
    for axis in reversed(axes):
        every = found.new_empty((dist.get_world_size(axis) * found.shape[0], *found.shape[1:]))
        with answered():
            ALL_GATHER(every, found, group=axis)
        found = every
    for to in range(found.shape[0]):
        if to != mine:
            count(to, x)
    return found


def scatter_sum(x: Tensor, axes: Axes) -> Tensor:
    """Return the sum over ranks of the part of x (P, ...) that is this rank's."""
    mine = rank_of(axes)
    for to in range(x.shape[0]):
        if to != mine:
            count(to, x[to])
    for axis in axes:
        part = x.new_empty((x.shape[0] // dist.get_world_size(axis), *x.shape[1:]))
        with answered():
            REDUCE_SCATTER(part, x.contiguous(), group=axis)
        x = part
    return x[0]


def swap(parts: Sequence[Tensor], sizes: Sequence[int], axis: Any) -> list[Tensor]:
    """Send part u to rank u; return what each sends here, flat, of `sizes` entries."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    got = flat.new_empty(sum(sizes))
    mine = dist.get_rank(axis)
    for to, part in enumerate(parts):
        if to != mine:
            count(to, part)
    with answered():
        dist.all_to_all_single(got, flat, list(sizes), [part.numel() for part in parts], group=axis)
    return list(got.split(list(sizes)))


class Messages:
    """Messages between pairs of ranks; what arrives is waited for when it is wanted."""

    def __init__(self, axis: Any) -> None:
        self.axis = axis
        self.rank, self.size = dist.get_rank(axis), dist.get_world_size(axis)

    def start(self, out: Tensor | None, to: int, into: Tensor | None, source: int) -> "Arriving":
        """Send `out` and receive `into`; None or an empty tensor is no message."""
        operations = []
        for run, tensor, peer in ((dist.isend, out, to), (dist.irecv, into, source)):
            if tensor is not None and tensor.numel():
                at = peer if self.axis is None else dist.get_global_rank(self.axis, peer)
                operations.append(dist.P2POp(run, tensor, at, self.axis))
        if out is not None:
            count(to, out)
        with answered():
            return Arriving(dist.batch_isend_irecv(operations) if operations else [], into, out)


class Arriving:
    """A message on its way; `sent` stays alive until it is there."""

    def __init__(self, works: list[Any], into: Tensor | None, sent: Tensor | None) -> None:
        self.works, self.into, self.sent = works, into, sent

    def wait(self) -> Tensor | None:
        """Return what was received."""
        with answered():
            for work in self.works:
                work.wait()
        self.sent = None
        return self.into
