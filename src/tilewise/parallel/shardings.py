"""Shardings: which rows of a sequence each rank of a group holds. They are values; nothing global knows them."""

import heapq
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache, partial
from operator import index as as_int
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..values.masks import Mask, mask_of
from ..values.value import integer
from .agree import Facts, agreed, together
from .exchange import Axes, gather, rank_of, scatter_sum, size_of
from .pieces import Pieces, index, join, length, spelt
from .reach import reach_of

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """Every sharding derives from this class.

    group: a ProcessGroup, None for all processes, or a DeviceMesh with one dimension, or two for Grid, the ring first.
    """

    group: Any

    @property
    def axes(self) -> Axes:
        """Return the process groups, the ring's before that of Ulysses."""
        if not isinstance(self.group, DeviceMesh):
            return (self.group,)
        return tuple([self.group.get_group(n) for n in range(self.group.ndim)])

    @property
    def ranks(self) -> int:
        """Return how many ranks share the sequence."""
        return size_of(self.axes)

    @property
    def rank(self) -> int:
        """Return this process's rank among them."""
        return rank_of(self.axes)

    @property
    def global_length(self) -> int | None:
        """Return the length that the sharding is for, None for any that divides."""
        return getattr(self, "length", None)

    def cut(self, N: int, ranks: int) -> tuple[Pieces, ...]:
        """Return the pieces of every rank, of N rows."""
        raise NotImplementedError

    def unit(self, ranks: int) -> int:
        """Return what a length must be a multiple of, unless the sharding knows it."""
        return ranks

    def pieces(self, N: int) -> tuple[Pieces, ...]:
        """Return the pieces of every rank: intervals of the N rows, in local order. Raise ValueError for another N."""
        name, unit, given = type(self).__name__, self.unit(self.ranks), self.global_length
        if given is not None and N != given:
            raise ValueError(f"{name}: length must be that of the sequence, {N}, got {given}; pass that one")
        if given is None and N % unit:
            raise ValueError(
                f"{name}: the length must be a multiple of {unit}, got {N}; pass length={N} for pieces of several sizes"
            )
        return _cut(self, N, self.ranks)

    def cut_for(self, name: str, m: int) -> tuple[int, tuple[Pieces, ...]]:
        """Return the length of the whole, and all pieces; raise ValueError if m are not the rows of this rank."""
        N = m * self.ranks if self.global_length is None else self.global_length
        N = as_int(N)  # a number in a graph, too: it is of one size
        pieces = self.pieces(N)
        own = length(pieces[self.rank])
        if m != own:
            raise ValueError(
                f"{name} must have the {own} rows that rank {self.rank} holds of {N}, got {m}; "
                "pass what sharding.shard(...) returns"
            )
        return N, pieces

    def shard(self, x: T, dim: int = 1) -> T:
        """Return this rank's rows of a whole tensor, or of each of several, in local order."""
        if not isinstance(x, Tensor):
            return type(x)(self.shard(t, dim) for t in x)  # type: ignore[call-arg, attr-defined]
        own = self.pieces(x.shape[dim])[self.rank]
        parts = [x.narrow(dim, start, end - start) for start, end in own or ((0, 0),)]
        return torch.cat(parts, dim) if len(parts) != 1 else parts[0].contiguous()  # type: ignore[return-value]

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return where this rank's rows are in the whole, int64 (m,), for rotary embeddings and position ids."""
        return index(self.pieces(length)[self.rank], device)  # type: ignore[arg-type]

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor, on every rank, from each rank's rows; differentiable.

        The gradient of a rank's rows is the sum, over the ranks, of what each one's copy gets.
        """
        rows = x.movedim(dim, 0)
        if torch.compiler.is_compiling():
            facts, pieces = self._prepared(rows)
            rows = agreed(rows, self.axes, facts)
        else:
            pieces = together(self.axes, x, partial(self._prepared, rows))
        return _Unshard.apply(rows, self.axes, pieces, False).movedim(0, dim)

    def _prepared(self, x: Tensor) -> tuple[Facts, tuple[Pieces, ...]]:
        """Return what `unshard` of rows says to other ranks, and all pieces."""
        N, pieces = self.cut_for("x", x.shape[0])
        facts = {
            "a call": "unshard",
            "x": f"{tuple(x.shape[1:])} {x.dtype} on {x.device.type}",
            "the length": str(N),
            "the sharding": spelt(pieces),
            "whether x requires a gradient": str(torch.is_grad_enabled() and x.requires_grad),
        }
        return facts, pieces


class _Unshard(torch.autograd.Function):
    """All rows on every rank, from each rank's; or back, each rank's of the sum over ranks: the other's gradient.

    Pieces are padded to the longest, as all ranks send alike.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, pieces: tuple[Pieces, ...], back: bool) -> Tensor:
        ctx.given = axes, pieces, back
        rows, places = [length(own) for own in pieces], [index(own, x.device) for own in pieces]
        if back:
            parts = x.new_zeros((len(pieces), max(rows), *x.shape[1:]))
            for part, at in zip(parts, places, strict=True):
                part[: len(at)] = x[at]
            return scatter_sum(parts, axes)[: rows[rank_of(axes)]]
        every = gather(torch.cat([x, x.new_zeros((max(rows) - x.shape[0], *x.shape[1:]))]), axes)
        whole = x.new_empty((sum(rows), *x.shape[1:]))
        for part, at in zip(every, places, strict=True):
            whole.index_copy_(0, at, part[: len(at)])
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        axes, pieces, back = ctx.given
        return _Unshard.apply(grad, axes, pieces, not back), None, None, None


def refuse_sharding(sharding: Any) -> None:
    """Raise TypeError for what is no sharding, which leaves nobody to tell."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding must be a sharding such as Zigzag(group), got {sharding!r}; write one of tilewise.parallel"
        )


@lru_cache(64)
def _cut(sharding: Sharding, N: int, ranks: int) -> tuple[Pieces, ...]:
    """Cut once for each sharding and length."""
    return sharding.cut(N, ranks)


@dataclass(frozen=True)
class Contiguous(Sharding):
    """One run of rows a rank, in order: for windows, and for plans "ulysses" and "gather" of masks alike for all rows.

    length: the sequence's, if it does not divide by the ranks; then pieces differ by a row.
    """

    length: int | None = None

    def cut(self, N: int, ranks: int) -> tuple[Pieces, ...]:
        return tuple(join([(r * N // ranks, (r + 1) * N // ranks)]) for r in range(ranks))


@dataclass(frozen=True)
class Zigzag(Sharding):
    """Of 2 P runs, run r and run 2 P - 1 - r: equal work under a causal mask.

    length: the sequence's, if it does not divide by 2 P.
    """

    length: int | None = None

    def unit(self, ranks: int) -> int:
        return 2 * ranks

    def cut(self, N: int, ranks: int) -> tuple[Pieces, ...]:
        ends = [x * N // (2 * ranks) for x in range(2 * ranks + 1)]
        return tuple(join((ends[x], ends[x + 1]) for x in (r, 2 * ranks - 1 - r)) for r in range(ranks))


@dataclass(frozen=True)
class Striped(Sharding):
    """Runs of `chunk` rows, dealt out to the ranks in turn.

    length: the sequence's, if it does not divide by P chunk.
    """

    chunk: int
    length: int | None = None

    def __post_init__(self) -> None:
        make_positive(self, "chunk")

    def unit(self, ranks: int) -> int:
        return ranks * self.chunk

    def cut(self, N: int, ranks: int) -> tuple[Pieces, ...]:
        starts = (range(r * self.chunk, N, ranks * self.chunk) for r in range(ranks))
        return tuple(join((i, min(N, i + self.chunk)) for i in own) for own in starts)


@dataclass(frozen=True)
class Balanced(Sharding):
    """Runs of `chunk` rows, dealt out so that every rank has as much work under a mask: for packed documents.

    mask: the whole's, as attention gets it; its tensors are read now, on the host. length: the sequence's. The solver
    is greedy: the chunk with the most work goes first, to the rank with the least.
    """

    mask: InitVar[Mask]
    length: int
    chunk: int
    work: tuple[float, ...] = field(init=False, repr=False)
    """The entries of P in each chunk's rows, a batch entry and head."""

    def __post_init__(self, mask: Mask) -> None:
        make_positive(self, "length", "chunk")
        if (found := mask_of(mask)) is None:
            raise TypeError(f"Balanced: mask must be a Mask, got {mask!r}; pass the one that attention gets")
        mask = found
        for part in [part for part in mask.parts if not part.broadcasts]:  # which would be a Dense, of a rank's rows
            sizes = [
                t.shape[-1] for shape, t in zip(part.shapes, part.tensors, strict=True) if shape[-1:] in ("M", "N")
            ]
            if any([size != self.length for size in sizes]):
                raise ValueError(
                    f"Balanced: mask must be of {self.length} rows and keys, got {part.public_name()} of {sizes[0]}; "
                    "pass that of the whole, and its length"
                )
        counts = reach_of(mask, self.length).counts()
        object.__setattr__(self, "work", tuple([float(part.sum()) for part in counts.split(self.chunk)]))

    def cut(self, N: int, ranks: int) -> tuple[Pieces, ...]:
        return deal(self.work, N, ranks, self.chunk)


def deal(work: Sequence[float], N: int, ranks: int, chunk: int) -> tuple[Pieces, ...]:
    """Deal chunks out, the longest first, each to the least loaded rank that has room."""
    room = -(-len(work) // ranks)
    own: list[list[int]] = [[] for _ in range(ranks)]
    free = [(0.0, r) for r in range(ranks)]
    for c in sorted(range(len(work)), key=lambda c: -work[c]):
        load, r = heapq.heappop(free)
        own[r].append(c)
        if len(own[r]) < room:
            heapq.heappush(free, (load + work[c], r))
    return tuple(join((c * chunk, min(N, c * chunk + chunk)) for c in sorted(chunks)) for chunks in own)


def make_positive(value: Any, *fields: str) -> None:
    """Make fields of a value ints > 0, or raise an error that names them."""
    for field_name in fields:
        name = f"{type(value).__name__}: {field_name}"
        number = integer(name, getattr(value, field_name), "an int > 0")
        if number <= 0:
            raise ValueError(f"{name} must be an int > 0, got {number}; pass how many rows")
        object.__setattr__(value, field_name, number)
