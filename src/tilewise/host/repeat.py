"""Repeat a call that has run: allocate its results, and launch what it launched, with their addresses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.calls import guard
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem
from .arguments import adjacent, unplanned
from .gather import add_sums
from .launch import profiled
from .outputs import EMPTY_CUDA, size, sizes
from .replay import MOST, Replay
from .sink import sink_learns


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


EMPTY: Any = EMPTY_CUDA or _empty
CURRENT: Any = getattr(torch._C, "_cuda_getDevice", None)
STREAM: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
CAPTURING: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
LINE = 512
"""Parts of a workspace begin at multiples of so many bytes, as the allocator's tensors do."""


def aligned(addresses: Sequence[int]) -> list[bool]:
    """Return which addresses are on 16-byte boundaries."""
    return [address % 16 == 0 for address in addresses]


def of_addresses(addresses: Sequence[int]) -> tuple[list[bool], bool]:
    """Return what launches depend on of the addresses of q, k, v and the rest, and guards do not see: which are on
    16-byte boundaries, and whether v begins where k does, as it may be inside k."""
    return aligned(addresses), addresses[1] == addresses[2]


def launch(launches: Any) -> None:
    """Run launchers with their arguments; where the driver refuses, the second way tells why."""
    for start, given, again in launches:
        if start(*given):
            again()


def repeated(p: Problem, pl: Any, x: Operands, seed: Tensor | None, sums: Any = None, counters: Any = None) -> Any:
    """Return what repeats a forward of a plan, a Forward; None if its launches were not kept, or read copies or codes.
    `sums` and `counters` are as there."""
    replay = pl.replays.get(0)
    if replay is None or replay.launches is None or any([adjacent(t) is not t for t in x[:3]]):
        return None
    of_o, of_lse, *_ = sizes(p)
    return Forward(replay, of_o, of_lse, (*x[:3], *x.extra), sums, counters, seed is not None)


class Forward:
    """A forward's launches."""

    differentiable = False
    """Whether autograd records what `run` calls."""

    def __init__(
        self, replay: Replay, o: Any, lse: Any, tensors: Sequence[Tensor], sums: Any, counters: Any, seeded: bool
    ) -> None:
        """`o`, `lse` and `sums` are sizes, `sums` of partial sums or None; `counters` are addresses by stream, or
        None."""
        self.replay, self.o, self.lse, self.sums, self.counters, self.seeded = replay, o, lse, sums, counters, seeded
        self.index, self.count = tensors[0].device.index, len(tensors)
        self.places = of_addresses([t.data_ptr() for t in tensors])
        self.name = ""
        """The back end's."""

    def run(self, tensors: Sequence[Tensor], seed: Tensor | None) -> tuple[Any, ...] | None:
        """Return o, lse, the seed and no tensors for the backward; None where the launches must be made anew."""
        index, counters = self.index, self.counters
        if CURRENT() != index or profiled() or (counters is not None and CAPTURING()):
            return None
        stream, o, lse = STREAM(index), EMPTY(*self.o), EMPTY(*self.lse)
        addresses = [t.data_ptr() for t in tensors]
        addresses += o.data_ptr(), lse.data_ptr()
        if self.sums is not None:
            sums = EMPTY(*self.sums)
            addresses.append(sums.data_ptr())
        else:
            addresses.append(seed.data_ptr() if self.seeded and seed is not None else 0)
            if counters is not None:
                if (counter := counters.get(stream)) is None:
                    return None
                addresses.append(counter)
        addresses.append(stream)
        key = tuple(addresses)
        launches = self.replay.filled.get(key) or self.fill(key)
        launch(launches)
        return (o, lse, seed, ()) if launches else None

    def fill(self, key: tuple[int, ...]) -> Any:
        """Return the launches with all addresses; none where they must be made anew."""
        return self.replay.fill(key) if of_addresses(key[: self.count]) == self.places else ()


def repeated_backward(
    p: Problem, pl: Any, work: Sequence[Any], x: Operands, saved: Saved, do: Tensor, counters: Any = None,
    empty_sums: Any = None,
) -> Any:  # fmt: skip
    """Return what repeats a backward of a plan, a Backward; None if its launches were not kept, or read copies, or are
    not all that it needs. `work` and `counters` are its sizes and counters; `empty_sums` allocates sums for scores."""
    replay = pl.replays.get(unplanned(saved, do, None))
    if replay is None or replay.launches is None or p.recipe.packed or not saved.lse.is_contiguous():
        return None
    if sum(p.wanted) > sink_learns(p) and not empty_sums:
        return None
    given, seeded = [*x[:3], *x.extra, *(t for t in saved[:3] if t is not None)], saved.seed is not None
    return Backward(p, replay, work, counters, given, do, seeded, empty_sums)


class Backward:
    """A backward's launches, with what they write and what passes between them in one workspace."""

    def __init__(
        self, p: Problem, replay: Replay, work: Sequence[Any], counters: Any, given: Sequence[Tensor], do: Tensor,
        seeded: bool, empty_sums: Any,
    ) -> None:  # fmt: skip
        """`work`: the sizes of the workspace's tensors, in the order of the launches; None for one that is left out.
        `counters`: as in a Forward. `given`: the operands, o, lse and the seed if there is one."""
        self.p, self.replay, self.grads, self.counters, self.seeded = p, replay, sizes(p)[2:], counters, seeded
        wanted = p.wanted or (False,) * len(p.extra)
        self.of_extra = [size(t.dtype, *t.shape) if want else None for t, want in zip(p.extra, wanted, strict=True)]
        self.learns, self.empty_sums = any(wanted), empty_sums or (lambda _: ())
        self.index, self.offsets, end = do.device.index, [], 0
        for each in work:
            self.offsets.append(None if each is None else end)
            if each is not None:
                end += -(-torch.Size(each[0]).numel() * each[2].itemsize // LINE) * LINE
        self.work = (end,), (1,), torch.uint8
        self.filled: dict[Any, Any] = {}
        self.aligned = aligned([t.data_ptr() for t in (*given, do)])
        places = {id(t): n for n, t in reversed([*enumerate((do, *given))])}
        self.firsts = None if len(places) == 1 + len(given) else sorted(places.values())
        """Where each tensor is given first, if one is given twice, as guards take each once."""
        self.alike = guard(self.once(do, given))

    def once(self, do: Tensor, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors, each once."""
        return (do, *given) if self.firsts is None else [(do, *given)[n] for n in self.firsts]

    def run(self, do: Tensor, given: Sequence[Tensor]) -> Any:
        """Return dq, dk, dv and gradients of extra operands; None where the launches must be made anew."""
        index = self.index
        if not self.alike(*self.once(do, given)) or CURRENT() != index or profiled() or CAPTURING():
            return None
        stream, (of_q, of_k, of_v), work = STREAM(index), self.grads, EMPTY(*self.work)
        dq, dk, dv = EMPTY(*of_q), EMPTY(*of_k), EMPTY(*of_v)
        addresses = [t.data_ptr() for t in given]
        addresses += do.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), work.data_ptr(), stream
        if self.learns:
            extra = tuple([each and EMPTY(*each) for each in self.of_extra])
            sums = self.empty_sums(Grads(dq, dk, dv, extra))
            addresses += [t.data_ptr() for t in (*extra, *sums) if t is not None]
        key = tuple(addresses)
        launches = self.filled.get(key) or self.fill(key)
        if launches is None:
            return None
        launch(launches)
        if not self.learns:
            return dq, dk, dv
        add_sums(self.p, Grads(dq, dk, dv, extra), sums)
        return dq, dk, dv, *extra

    def fill(self, key: tuple[int, ...]) -> Any:
        """Return the launches with all addresses, and keep them; None where they must be made anew."""
        count = 5 + len(self.of_extra) + self.seeded
        given, (do, dq, dk, dv, work, stream, *learned) = key[:count], key[count:]
        counter = () if self.counters is None else (self.counters.get(stream),)
        if None in counter or aligned((*given, do)) != self.aligned:
            return None
        parts = [0 if offset is None else work + offset for offset in self.offsets]
        seeds = () if self.seeded else (0,)
        left = iter(learned)
        extra = [next(left) if each else 0 for each in self.of_extra]
        full = (*given, *seeds, do, 0, *parts, dq, dk, dv, *extra, *left, *counter, stream)
        launches = self.replay.fill(full) or None
        if full in self.replay.filled:  # else its arguments are not packed yet
            if len(self.filled) >= MOST:
                self.filled.clear()
            self.filled[key] = launches
        return launches


class Append:
    """The launch that writes into a cache."""

    def __init__(self, replay: Replay, given: Sequence[Tensor], y: Any) -> None:
        """`y`: the size of q's result, which is the launch's last tensor, or None."""
        self.replay, self.y = replay, y
        self.index, self.aligned = given[0].device.index, aligned([t.data_ptr() for t in given])

    def run(self, given: Sequence[Tensor]) -> tuple[bool, Tensor | None]:
        """Write, and return q with rotary applied. The first is False where the launch must be made anew."""
        if CURRENT() != self.index or profiled():
            return False, None
        found, y = [t.data_ptr() for t in given], None
        if self.y is not None:
            y = EMPTY(*self.y)
            found.append(y.data_ptr())
        key = (*found, STREAM(self.index))
        launches = self.replay.filled.get(key)
        if launches is None and aligned(found[: len(given)]) == self.aligned:
            launches = self.replay.fill(key)
        launch(launches or ())
        return bool(launches), y
