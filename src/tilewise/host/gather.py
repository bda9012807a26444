"""Launches for the gradients of tensors that scores read, and what follows them (tile/gather.py)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.backend import never
from ..call.operands import Grads, Operands
from ..call.problem import Problem
from ..program.derive import gathers
from ..program.distance import drifts
from ..program.program import Program, operands
from ..tile.gather import Gather, Orbits, Sums, Way, attention_backward_gather
from ..values.value import Unsupported
from .arguments import cdiv, lengths, odd, packed_by
from .bias import Recompute
from .emit import gather_functions
from .launch import Launch, multiprocessors
from .values import captured, form_of

PROGRAMS = 4
"""At least so many programs for each multiprocessor share the work, where there is enough."""
MOST = 256 << 20
"""Bytes of sums that wait at once to be added in a fixed order."""


class Read(NamedTuple):
    """One place where a score reads a tensor that learns."""

    score: int
    """The score's place among the scores."""
    tensor: int
    """The tensor's place among the extra operands."""
    load: int
    """The node of the score's program."""
    by: frozenset[str]
    """Which of b, h, i and j the entry depends on."""
    diagonal: bool
    """Whether it depends on i - j alone, of i and j."""
    dims: tuple[str, ...] | None
    """Which of them indexes each dimension, "" for one of size 1; None if an index is anything else."""
    whole: bool
    """Whether this alone gives every entry of the tensor its gradient."""


class Orbited(NamedTuple):
    """How a launch divides a read's work."""

    batch: int
    heads: int
    orbits: int
    """Those of one head of one batch entry."""
    parts: int


def reads_of(p: Problem, extra: Sequence[Any]) -> tuple[Read, ...]:
    """Return where scores read tensors whose gradients are wanted."""
    if 0 in (p.B, p.M, p.N) or not any(p.wanted):
        return ()
    if (found := p.computed.get(reads_of)) is None:
        found = p.computed[reads_of] = tuple(_reads_of(p, extra))
    return found


def _reads_of(p: Problem, extra: Sequence[Any]) -> Iterator[Read]:
    masks, scores, _ = p.values(tuple(extra))
    padded = packed_by(p, tuple(extra)) is None
    first = sum([len(mask.tensors) for mask in masks])
    for position, score in enumerate(scores):
        program, tensors, _, align = score.traced
        drift, learned = drifts(program), [n for n in range(len(tensors)) if p.wanted[first + n]]
        loads = gathers(program, learned)
        for n in loads:
            index = operands(program.nodes[n])
            by: frozenset[str] = frozenset().union(*[program.reads[x] for x in index])
            if "s" in by:
                raise Unsupported(
                    f"{score.public_name()}: kernels compute no gradient of a tensor that the logit s indexes; use "
                    "backend='cpu', or a tensor that requires none"
                )
            if not padded and ("shift" in by or (align == "last" and "i" in by)):
                by |= {"b"}
            t = program.nodes[n][1]
            shifted = align == "last" and not (padded and p.M == p.N)
            dims = _dims(program, index, tensors[t].shape, shifted)
            alone = [program.nodes[other][1] for other in loads].count(t) == 1
            sizes = {"": 1, "b": p.B, "h": p.H, "i": p.M, "j": p.N}
            whole = dims is not None and alone and tuple([sizes[c] for c in dims]) == tuple(tensors[t].shape)
            diagonal = {"i", "j"} <= by and all([drift[x] == 0 for x in index])
            yield Read(position, first + t, n, by & frozenset("bhij"), diagonal, dims, whole)
        first += len(tensors)


def _dims(program: Program, index: Sequence[int], shape: Sequence[int], shifted: bool) -> tuple[str, ...] | None:
    """Return which input indexes each dimension; None if any index is another, or two are the same."""
    dims = []
    for x, size in zip(index, shape, strict=True):
        match program.nodes[x]:
            case "in", ("b" | "h" | "i" | "j") as name if name not in dims and not (name == "i" and shifted):
                dims.append(name)
            case "lit", 0 if size == 1:
                dims.append("")
            case _:
                return None
    return tuple(dims)


def orbits_of(p: Problem, read: Read, tiles: Any) -> Orbited:
    """Return how a launch divides a read's work."""
    tiles_r, tiles_c = cdiv(p.M, tiles.B_r), cdiv(p.N, tiles.B_c)
    batch, heads = p.B if "b" in read.by else 1, p.H if "h" in read.by else 1
    orbits, steps = (tiles_r if "i" in read.by else 1) * (tiles_c if "j" in read.by else 1), 1
    if read.diagonal:
        square = max(tiles.B_r, tiles.B_c)
        down, along = square // tiles.B_r, square // tiles.B_c
        orbits = min(down, tiles_r) * tiles_c + max(tiles_r - down, 0) * min(along, tiles_c)
        steps = min(cdiv(tiles_r, down), cdiv(tiles_c, along))
    elif "i" not in read.by:
        steps = tiles_r
    steps *= p.B // batch * (p.H // heads)
    wanted = cdiv(PROGRAMS * multiprocessors(p.q.device), batch * heads * orbits)
    return Orbited(batch, heads, orbits, min(wanted, steps))


def empty_sums(p: Problem, x: Operands, grads: Grads, tiles: Any) -> list[Tensor | None]:
    """Allocate what each read's launch writes: the gradient itself, sums in fp32 of each part, or zeros to add to; None
    for what `add_sums` launches."""
    made: list[Tensor | None] = []
    for read in reads_of(p, x.extra):
        if read.dims is not None:
            made.append(sums_of(read, grads, orbits_of(p, read, tiles).parts))
        elif p.recipe.deterministic:
            made.append(None)
        else:
            made.append(torch.zeros_like(grads.extra[read.tensor], dtype=torch.float32))  # type: ignore[arg-type]
    return made


def sums_of(read: Read, grads: Grads, parts: int) -> Tensor:
    """Allocate what so many parts of a read's work write: the gradient itself where one gives all of it, else sums in
    fp32."""
    grad: Any = grads.extra[read.tensor]
    if read.whole and parts == 1:
        return grad
    make = torch.empty if read.whole else torch.zeros
    return make((parts, *grad.shape), dtype=torch.float32, device=grad.device)


def addresses(read: Read, sums: Tensor) -> Sums:
    """Return where sums lie that heads, rows and columns index, and batch entries."""
    steps, stride = dict.fromkeys("bhij", 0), sums.stride()
    if read.dims is not None:
        steps |= dict(zip(read.dims, stride[len(stride) - len(read.dims) :], strict=True))
    # any number steps over what there is one of
    part, b, h = (odd(n or 1) for n in (stride[0], steps["b"], steps["h"]))
    return Sums(sums, None, part, b, h, steps["i"], steps["j"])


def gather_of(p: Problem, extra: Sequence[Tensor], read: Read) -> Gather:
    """Return how a score reads a tensor, as kernels take it."""
    traced, where = p.values(tuple(extra))[1][read.score].traced, packed_by(p, tuple(extra))
    form = form_of(p, traced, where)
    made = gather_functions(traced.program.text, read.load, form)
    offset: Any = None if read.dims is not None else made["offset"]
    scale = p.scale if read.score == 0 else 1.0
    return Gather(captured(p, traced, form, where), scale, made["value"], offset)


def entries_read(p: Problem, read: Read) -> tuple[int, int]:
    """Count the entries of a tensor that rows and columns index."""
    sizes = dict(zip(read.dims or (), p.extra[read.tensor].shape, strict=False))
    return min(p.M, sizes.get("i", 1)), min(p.N, sizes.get("j", 1))


def gather_launches(c: Recompute, sums: Sequence[Tensor | None]) -> Iterator[Launch]:
    """Yield a launch for every read that has sums."""
    for read, own in zip(reads_of(c.p, c.extra), sums, strict=True):
        if own is None:
            continue
        yield launch_of(c, read, addresses(read, own), add=read.dims is None)


def launch_of(c: Recompute, read: Read, to: Sums, add: bool, first: int = 0, count: int | None = None) -> Launch:
    """Return the launch of a read; of `count` orbits a head from the first on, if they are not all."""
    p, tiles = c.p, c.tiles
    batch, heads, orbits, parts = orbits_of(p, read, tiles)
    count = orbits if count is None else count
    counts = Orbits(*map(odd, (
        parts, first, count, heads, cdiv(p.M, tiles.B_r), cdiv(p.N, tiles.B_c), p.B // batch, p.H // heads,
        *entries_read(p, read), c.stride,
    )))  # fmt: skip
    way = Way(read.score, "i" in read.by, "j" in read.by, read.diagonal, add, c.block)
    arguments = (
        *c.operands, to, packed_by(p, c.extra), c.variant, gather_of(p, c.extra, read), c.unit, *lengths(p), p.H,
        counts,
    )  # fmt: skip
    ptr: Any = to.ptr
    key = c.key, read, add, ptr.dtype, ptr.data_ptr() % 16
    constants = {"way": way, **c.constants}
    return Launch(attention_backward_gather, batch * heads * count * parts, arguments, constants, c.pl.compiled, key)


def add_sums(
    p: Problem, grads: Grads, sums: Sequence[Tensor | None], recompute: Callable[[], Any] = never,
    stream: int | None = None,
) -> None:  # fmt: skip
    """Write the gradients whose launches wrote sums. They are rounded once."""
    totals: dict[int, Tensor] = {}
    for read, own in zip(reads_of(p, p.extra), sums, strict=True):
        grad: Any = grads.extra[read.tensor]
        if own is grad:
            continue
        found = _in_order(recompute(), read, grad.shape, stream) if own is None else own
        found = found.sum(0) if found.ndim > grad.ndim else found
        totals[read.tensor] = totals[read.tensor] + found if read.tensor in totals else found
    for n, total in totals.items():
        grads.extra[n].copy_(total)  # type: ignore[union-attr]


def _in_order(c: Recompute, read: Read, shape: Sequence[int], stream: int | None) -> Tensor:
    """Return the sums of a read's orbits, added in a fixed order."""
    batch, heads, orbits, parts = orbits_of(c.p, read, c.tiles)
    device = c.operands[0].ptr.device
    size = (c.tiles.B_r if "i" in read.by else 1) * (c.tiles.B_c if "j" in read.by else 1)
    total = torch.zeros(shape, dtype=torch.float32, device=device)
    some = max(1, MOST // (12 * parts * batch * heads * size))
    for first in range(0, orbits, some):
        count = min(some, orbits - first)
        found = torch.empty((parts, batch, heads, count, size), dtype=torch.float32, device=device)
        offsets = torch.empty(found.shape, dtype=torch.int64, device=device)
        part, b, h, *steps = found.stride()
        launch_of(c, read, Sums(found, offsets, *map(odd, (part, b, h)), *steps), False, first, count).run(stream)
        there = offsets >= 0
        index = torch.where(there, offsets, 0).flatten()
        total.view(-1).index_put_((index,), torch.where(there, found, 0.0).flatten(), accumulate=True)
    return total
