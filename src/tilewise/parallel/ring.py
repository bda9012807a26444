"""Keys come to queries: pairwise from their owners ("ring"), all of them ("gather"), or what rows see ("halo").

All are one autograd.Function over the calls of `Shards`. They differ in how keys arrive and gradients leave, and in
whether a row's keys are there at once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.dispatch import refuse_double_backward
from ..merge.sink import sink_gradient
from .exchange import Message, gather, scatter_sum
from .halo import Halo
from .pieces import Pieces, index, length, places
from .shards import Given, Parts, Shards, backward_parts, forward_at_once, forward_parts, wide

Source = tuple[int, tuple[Tensor, ...], Parts]
"""Whose keys have arrived, k and v, none if nothing of them is visible, and the calls with them."""


class Pairwise:
    """Step s: a rank asks the owner of what it needs of rank r - s, while it computes step s - 1.

    Nothing is forwarded and nothing unneeded travels. Gradients of keys go straight to their owner, in the type of
    sums, while the next step is computed; the owner adds them up. One message of each kind is on its way at a time.
    """

    at_once = False

    def __init__(self, s: Shards) -> None:
        self.s, self.rank, self.size = s, s.own, len(s.pieces)
        self.back: tuple[Message, Pieces] | None = None

    def sources(self, *keys: Tensor) -> Iterator[Source]:
        """Yield the keys of every rank, this one's first, then from the nearest rank on."""
        ahead = self._fetch(1, keys) if self.size > 1 else None
        own = self.s.pair(self.rank, self.rank)
        yield self.rank, self._rows(keys, own.keys), own
        for step in range(1, self.size):
            arriving, ahead = ahead, self._fetch(step + 1, keys) if step + 1 < self.size else None
            flat, source = arriving.wait(), (self.rank - step) % self.size  # type: ignore[union-attr]
            parts = self.s.pair(self.rank, source)
            yield source, unpack(flat, keys, length(parts.keys)), parts

    def _rows(self, tensors: tuple[Tensor, ...], wanted: Pieces) -> tuple[Tensor, ...]:
        """Return some of this rank's rows; () for none."""
        found = places(self.s.pieces[self.rank], wanted)
        return tuple(torch.cat([t[:, at] for at in found], 1) for t in tensors if found)

    def _fetch(self, step: int, keys: tuple[Tensor, ...]) -> Message:
        to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        wanted, coming = self.s.pair(to, self.rank).keys, self.s.pair(self.rank, source).keys
        return Message(self.s.axis, pack(self._rows(keys, wanted)), to, room_for(keys, length(coming)), source)

    def give_back(self, to: int, keys: Pieces, grads: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        """Send the gradients of a rank's keys to it, and receive those of this rank's keys from its counterpart.

        What came before is added to `totals`. Every rank calls it once for every source.
        """
        if to == self.rank:
            self._add(totals, grads, keys)
            return
        self.finish(totals)
        other = (2 * self.rank - to) % self.size
        coming = self.s.pair(other, self.rank).keys
        room = room_for(totals, length(coming))
        self.back = Message(self.s.axis, pack(grads), to, room, other), coming

    def finish(self, totals: tuple[Tensor, ...]) -> None:
        """Add to `totals` what is still on its way."""
        if self.back is not None:
            (arriving, coming), self.back = self.back, None
            self._add(totals, unpack(arriving.wait(), totals, length(coming)), coming)

    def _add(self, totals: tuple[Tensor, ...], grads: tuple[Tensor, ...], keys: Pieces) -> None:
        for total, grad in zip(totals, grads, strict=bool(grads)):
            parts = grad.split([b - a for a, b in keys], 1)
            for at, part in zip(places(self.s.pieces[self.rank], keys), parts, strict=True):
                total[:, at] += part


class Gathered:
    """All keys on every rank, in the whole's order: one call for each piece of rows, with the keys that it sees."""

    at_once = True

    def __init__(self, s: Shards) -> None:
        self.s, self.axes = s, (s.axis,)
        self.most = max(map(length, s.pieces))

    def sources(self, *keys: Tensor) -> Iterator[Source]:
        """Yield all keys at once."""
        padded = tuple(pad(t, (0, 0, 0, 0, 0, self.most - t.shape[1])) for t in keys)
        N = self.s.reach.N
        whole = [t.new_empty((t.shape[0], N, *t.shape[2:])) for t in keys]
        for own, flat in zip(self.s.pieces, gather(pack(padded), self.axes), strict=True):  # type: ignore[arg-type]
            at = index(own, flat.device)
            for into, part in zip(whole, unpack(flat, keys, self.most), strict=True):
                into.index_copy_(1, at, part[:, : len(at)])
        del flat, part
        boxed = self.s.parts(self.s.pieces[self.s.own], ((0, N),))
        first, end = boxed.keys[0] if boxed.keys else (0, 0)
        yield self.s.own, tuple(t[:, first:end] for t in whole if boxed.keys), boxed

    def give_back(self, to: int, keys: Pieces, grads: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        """Sum the gradients of all keys over the ranks, each rank its own."""
        first, end = keys[0] if grads else (0, 0)
        message = totals[0].new_zeros((len(self.s.pieces), sum(sizes(totals, self.most))))
        for own, flat in zip(self.s.pieces, message, strict=True):
            common = tuple((max(a, first), min(b, end)) for a, b in own if max(a, first) < min(b, end))
            for into, grad in zip(unpack(flat, totals, self.most), grads, strict=bool(grads)):
                for here, there in zip(places(own, common), places(((first, end),), common), strict=True):
                    into[:, here] = grad[:, there]
        for total, grad in zip(totals, unpack(scatter_sum(message, self.axes), totals, self.most), strict=True):
            total.copy_(grad[:, : total.shape[1]])

    def finish(self, totals: tuple[Tensor, ...]) -> None:
        """Do nothing: there is one source."""


EXCHANGES = {"ring": Pairwise, "gather": Gathered, "halo": Halo}


class Ring(torch.autograd.Function):
    """o and lse of a rank's rows, from keys that come to them; differentiable in q, k, v, the sink and `s.learned`."""

    @staticmethod
    def forward(ctx: Any, s: Shards, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *learned: Tensor) -> Any:
        o, lse = results(s, q, k, v, sink)
        ctx.s = s
        read = [t for part in s.mask.parts for t in part.tensors if not t.is_inference()]  # autograd sees them written
        ctx.save_for_backward(q, k, v, sink, o, lse, *learned, *read)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, sink, o, lse, *_ = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        return None, *Back.apply(ctx.s, q, k, v, sink, o, lse, do, dlse)


class Back(torch.autograd.Function):
    """The gradients of `Ring`, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return gradients(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward(ctx, *grads)


def results(s: Shards, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o, in q's type, and lse of this rank's rows."""
    B, M, H, _ = q.shape
    exchange, kind = EXCHANGES[s.plan](s), wide(q.dtype)

    def nothing(dtype: torch.dtype = q.dtype) -> tuple[Tensor, Tensor]:
        """Return (o, lse) of rows that see no keys."""
        o, lse = q.new_zeros((B, M, H, v.shape[-1]), dtype=dtype), q.new_full((B, H, M), -torch.inf, dtype=kind)
        if sink is not None:  # a key of value 0 that is in every row's sums already
            lse.copy_(sink.to(kind)[None, :, None].expand(B, H, M))
        return o, lse

    if exchange.at_once:
        ((_, keys, parts),) = exchange.sources(k, v)
        return forward_at_once(s, nothing, q, keys, parts, sink)
    sums = nothing(kind)
    for _, keys, parts in exchange.sources(k, v):
        forward_parts(s, sums, q, keys, parts)
    return sums[0].to(q.dtype), sums[1]


def gradients(
    s: Shards, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, o: Tensor, lse: Tensor, do: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, the sink and `s.learned`; None of a tensor that wants none."""
    kind, g = wide(q.dtype), Given(do, o, lse, dlse)
    dq, dk, dv = None, *(t.new_zeros(t.shape, dtype=kind) for t in (k, v))
    learned = [(torch.zeros_like(t, dtype=wide(t.dtype)), cuts) for t, cuts in s.learned if t.requires_grad]
    exchange = EXCHANGES[s.plan](s)
    for source, keys, parts in exchange.sources(k, v):
        dq, grads = backward_parts(s, g, q, keys, parts, dq, learned)
        exchange.give_back(source, parts.keys, grads, (dk, dv))
        del keys, grads  # before the next keys arrive
    exchange.finish((dk, dv))
    dq = q.new_zeros(q.shape) if dq is None else dq
    d_sink = None
    if sink is not None:
        delta = (do.to(kind) * o).sum(-1).transpose(1, 2)
        d_sink = sink_gradient(sink, lse, delta if dlse is None else delta - dlse).to(sink.dtype)
    totals = iter(learned)
    captured = [next(totals)[0].to(t.dtype) if t.requires_grad else None for t, _ in s.learned]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sink, *captured


def sizes(like: Sequence[Tensor], rows: int) -> list[int]:
    """Return how many numbers so many rows of each tensor (B, ..., H, D) have."""
    return [t.shape[0] * rows * t.shape[2] * t.shape[3] for t in like]


def room_for(like: Sequence[Tensor], rows: int) -> Tensor | None:
    """Return memory for a message of so many rows, None for none."""
    return like[0].new_empty(sum(sizes(like, rows))) if rows else None


def pack(tensors: tuple[Tensor, ...]) -> Tensor | None:
    """Return k and v in one message, None if there are none."""
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else None


def unpack(flat: Tensor | None, like: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Return what `pack` packed, of tensors (B, rows, H_k, D) with the other sizes of `like`."""
    if flat is None:
        return ()
    parts = flat.split(sizes(like, rows))
    return tuple(part.view(t.shape[0], rows, *t.shape[2:]) for t, part in zip(like, parts, strict=True))
