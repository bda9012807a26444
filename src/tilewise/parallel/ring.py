"""Keys come to queries: pairwise from their owners ("ring"), or all at once ("gather"); gradients go back to owners.

Both are one autograd.Function over the calls of `Shards`. They differ in how keys arrive and gradients leave.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.dispatch import refuse_double_backward
from ..merge.sink import sink_gradient
from ..values.score import Bias
from .exchange import Arriving, Messages, gather, scatter_sum
from .pieces import Pieces, index, length, places
from .shards import Given, Parts, Shards, backward_parts, forward_parts, rows_of, wide


class Source(NamedTuple):
    """Keys that have arrived: k and v of `rank`, none if nothing of them is seen, and the calls with them."""

    rank: int
    keys: tuple[Tensor, ...]
    parts: Parts


class Pairwise:
    """Step s: a rank asks the owner of what it needs of rank r - s, while it computes step s - 1.

    Nothing is forwarded and nothing unneeded travels. Gradients of keys go straight to their owner, in the type of
    sums, while the next step is computed; the owner adds them up. One message of each kind is on its way at a time.
    """

    def __init__(self, s: Shards, axis: Any) -> None:
        self.s, self.messages = s, Messages(axis)
        self.back: tuple[Arriving, Pieces] | None = None

    def sources(self, *keys: Tensor) -> Iterator[Source]:
        """Yield the keys of every rank, this one's first, then from the nearest rank on."""
        s, r, P = self.s, self.messages.rank, self.messages.size
        ahead = self._fetch(1, keys) if P > 1 else None
        own = s.pair(r, r)
        yield Source(r, tuple(torch.cat([t[:, at] for at in self._places(own.keys)], 1) for t in keys if own.keys), own)
        for step in range(1, P):
            arriving, ahead = ahead, self._fetch(step + 1, keys) if step + 1 < P else None
            flat, source = arriving.wait(), (r - step) % P  # type: ignore[union-attr]
            parts = s.pair(r, source)
            yield Source(source, () if flat is None else tuple(unpack(flat, keys, length(parts.keys))), parts)

    def _places(self, keys: Pieces) -> list[slice]:
        return places(self.s.pieces[self.messages.rank], keys)

    def _fetch(self, step: int, keys: tuple[Tensor, ...]) -> Arriving:
        r, P = self.messages.rank, self.messages.size
        to, source = (r + step) % P, (r - step) % P
        wanted, coming = self.s.pair(to, r).keys, self.s.pair(r, source).keys
        out = pack([torch.cat([t[:, at] for at in self._places(wanted)], 1) for t in keys]) if wanted else None
        into = keys[0].new_empty(entries(keys, length(coming))) if coming else None
        return self.messages.start(out, to, into, source)

    def give_back(self, source: Source, grads: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        """Send the gradients of a source's keys to it, and receive those of this rank's keys from its counterpart.

        What came before is added to `totals`. Every rank calls it once for every source.
        """
        r, P = self.messages.rank, self.messages.size
        if source.rank == r:
            self._add(totals, grads, source.parts.keys)
            return
        self.finish(totals)
        other = (2 * r - source.rank) % P
        coming = self.s.pair(other, r).keys
        into = totals[0].new_empty(entries(totals, length(coming))) if coming else None
        out = pack(list(grads)) if grads else None
        self.back = self.messages.start(out, source.rank, into, other), coming

    def finish(self, totals: tuple[Tensor, ...]) -> None:
        """Add to `totals` what is still on its way."""
        if self.back is not None:
            (arriving, coming), self.back = self.back, None
            if (flat := arriving.wait()) is not None:
                self._add(totals, tuple(unpack(flat, totals, length(coming))), coming)

    def _add(self, totals: tuple[Tensor, ...], grads: tuple[Tensor, ...], keys: Pieces) -> None:
        for total, grad in zip(totals, grads, strict=bool(grads)):
            base = 0
            for at in self._places(keys):
                total[:, at] += grad[:, base : base + at.stop - at.start]
                base += at.stop - at.start


class Gathered:
    """All keys on every rank, in the whole's order: one call for each piece of rows, with the keys that it sees."""

    def __init__(self, s: Shards, axis: Any) -> None:
        self.s, self.axes = s, (axis,)
        self.most = max(rows_of(s.pieces))

    def sources(self, *keys: Tensor) -> Iterator[Source]:
        """Yield all keys at once."""
        padded = [torch.cat([t, t.new_zeros((t.shape[0], self.most - t.shape[1], *t.shape[2:]))], 1) for t in keys]
        N = self.s.reach.N
        whole = [t.new_empty((t.shape[0], N, *t.shape[2:])) for t in keys]
        for own, flat in zip(self.s.pieces, gather(pack(padded), self.axes), strict=True):
            at = index(own, flat.device)
            for into, part in zip(whole, unpack(flat, keys, self.most), strict=True):
                into.index_copy_(1, at, part[:, : len(at)])
        del flat, part
        boxed = self.s.parts(self.s.pieces[self.s.own], ((0, N),))
        first, end = boxed.keys[0] if boxed.keys else (0, 0)
        yield Source(self.s.own, tuple(t[:, first:end] for t in whole if boxed.keys), boxed)

    def give_back(self, source: Source, grads: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> None:
        """Sum the gradients of all keys over the ranks, each rank its own."""
        first, end = source.parts.keys[0] if grads else (0, 0)
        message = totals[0].new_zeros((len(self.s.pieces), entries(totals, self.most)))
        for own, flat in zip(self.s.pieces, message, strict=True):
            for into, grad in zip(unpack(flat, totals, self.most), grads, strict=bool(grads)):
                base = 0
                for a, b in own:
                    lo, hi = max(a, first), min(b, end)
                    if lo < hi:
                        into[:, base + lo - a : base + hi - a] = grad[:, lo - first : hi - first]
                    base += b - a
        for total, grad in zip(totals, unpack(scatter_sum(message, self.axes), totals, self.most), strict=True):
            total.copy_(grad[:, : total.shape[1]])

    def finish(self, totals: tuple[Tensor, ...]) -> None:
        """Do nothing: there is one source."""


EXCHANGES = {"ring": Pairwise, "gather": Gathered}


class Ring(torch.autograd.Function):
    """o and lse of a rank's rows, from keys that come to them."""

    @staticmethod
    def forward(
        ctx: Any, s: Shards, plan: str, axis: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *biases: Tensor
    ) -> Any:
        o, lse = results(s, plan, axis, q, k, v, sink)
        ctx.given = s, plan, axis
        read = [t for part in s.mask.parts for t in part.tensors if not t.is_inference()]  # autograd sees them written
        ctx.save_for_backward(q, k, v, sink, o, lse, *biases, *read)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:  # type: ignore[override]
        q, k, v, sink, o, lse, *_ = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        return None, None, None, *Back.apply(*ctx.given, q, k, v, sink, o, lse, do, dlse)


class Back(torch.autograd.Function):
    """The gradients of `Ring`, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return gradients(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_double_backward(ctx, *grads)


def results(
    s: Shards, plan: str, axis: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o, in q's type, and lse of this rank's rows."""
    B, M, H, _ = q.shape
    kind = wide(q.dtype)
    o, lse = q.new_zeros((B, M, H, v.shape[-1]), dtype=kind), q.new_full((B, H, M), -torch.inf, dtype=kind)
    if sink is not None:  # a key of value 0 that every row has seen already
        lse.copy_(sink.to(kind)[None, :, None].expand(B, H, M))
    for source in EXCHANGES[plan](s, axis).sources(k, v):
        forward_parts(s, (o, lse), q, source.keys, source.parts)
    return o.to(q.dtype), lse


def gradients(
    s: Shards, plan: str, axis: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, o: Tensor, lse: Tensor,
    do: Tensor, dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k, v, the sink and every Bias; None of a bias that wants none."""
    kind = wide(q.dtype)
    delta = (do.to(kind) * o).sum(-1).transpose(1, 2)
    g = Given(do, o, lse, delta if dlse is None else delta - dlse)
    dq, dk, dv = (torch.zeros_like(t, dtype=kind) for t in (q, k, v))
    learned = {
        n: torch.zeros_like(one.bias, dtype=wide(one.bias.dtype))
        for n, one in enumerate(s.score)
        if isinstance(one, Bias) and one.bias.requires_grad
    }
    exchange = EXCHANGES[plan](s, axis)
    for source in exchange.sources(k, v):
        grads = backward_parts(s, g, q, source.keys, source.parts, dq, learned)
        exchange.give_back(source, grads, (dk, dv))
        del source, grads  # before the next keys arrive
    exchange.finish((dk, dv))
    d_sink = None if sink is None else sink_gradient(sink, lse, g.delta).to(sink.dtype)
    of_biases = [
        learned[n].to(one.bias.dtype) if n in learned else None
        for n, one in enumerate(s.score)
        if isinstance(one, Bias)
    ]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sink, *of_biases


def ring(s: Shards, plan: str, axis: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
    """Return o and lse of this rank's rows, differentiable in q, k, v, the sink and every Bias."""
    biases = [one.bias for one in s.score if isinstance(one, Bias)]
    return Ring.apply(s, plan, axis, q, k, v, sink, *biases)


def entries(keys: tuple[Tensor, ...], rows: int) -> int:
    """Return how many numbers some rows of k and v are."""
    return sum(t.shape[0] * rows * t.shape[2] * t.shape[3] for t in keys)


def pack(tensors: list[Tensor]) -> Tensor:
    """Return k and v in one message."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unpack(flat: Tensor, like: tuple[Tensor, ...], rows: int) -> list[Tensor]:
    """Return what `pack` packed, of tensors (B, rows, H_k, D) with the other sizes of `like`."""
    sizes = [t.shape[0] * rows * t.shape[2] * t.shape[3] for t in like]
    shapes = [(t.shape[0], rows, *t.shape[2:]) for t in like]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
