"""Programs in PyTorch: on index tensors of any shape, for the CPU, the reference, and dense masks.

Whole numbers are int64, floating ones have the logits' type. Negative indices into captured tensors count from the end;
others outside of them raise torch's IndexError.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derive import derivative, gathers
from .ops import OPS
from .program import Node, Program, literal, operands


class Entries(NamedTuple):
    """The entries of the logits that a program is computed for: index tensors that broadcast to S (B, H, M, N)."""

    b: Tensor  # (B, 1, 1, 1)
    h: Tensor  # (1, H, 1, 1)
    i: Tensor  # (M, 1), from 0
    j: Tensor  # (1, N)
    shift: int = 0
    """N - M: what row indices are shifted by, so that the last row's is the last key's."""
    ranges: tuple[slice, slice, slice, slice] | None = None
    """The same as ranges of b, h, i and j, where tensors are read as views; None of other indices."""
    seen: Tensor | None = None
    """Which of them the mask shows, where only those count for gradients; None for all."""

    @property
    def aligned(self) -> Tensor:
        """Return the row indices, shifted."""
        return self.i + self.shift

    def from_last(self) -> "Entries":
        """Return the entries with row indices that are shifted."""
        ranges = self.ranges
        if ranges is not None:
            b, h, i, j = ranges
            first = i.start + self.shift
            ranges = None if first < 0 else (b, h, slice(first, i.stop + self.shift), j)
        return self._replace(i=self.aligned, ranges=ranges)

    @staticmethod
    def at(ranges: tuple[slice, slice, slice, slice], shift: int, device: torch.device | str = "cpu") -> "Entries":
        """Return the entries in ranges of b, h, i and j."""
        b, h, i, j = [torch.arange(one.start, one.stop, device=device) for one in ranges]
        return Entries(b[:, None, None, None], h[:, None, None], i[:, None], j[None, :], shift, ranges)

    @staticmethod
    def of(B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> "Entries":
        """Return all entries of logits (B, H, M, N)."""
        return Entries.at((slice(0, B), slice(0, H), slice(0, M), slice(0, N)), N - M, device)._replace(ranges=None)


def run(
    program: Program,
    inputs: Mapping[str, Any],
    tensors: Sequence[Tensor] = (),
    numbers: Sequence[Any] = (),
    real: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the program's outputs.

    inputs: by name: b, h, i, j and shift, s and g where the program reads them; `numbers` are those given to the
        function.
    real: the type of floating numbers, torch.float32 or torch.float64.
    """
    types = {"f": real, "i": torch.int64, "b": torch.bool}
    given = Given(inputs, tensors, numbers, types, next(iter(inputs.values())).device, inputs.get("ranges"))
    values: list[Any] = []
    for step in steps(program):
        values.append(step(values, given))
    return [values[n] for n in program.outputs]


class Given(NamedTuple):
    """What a run is given."""

    inputs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    numbers: Sequence[Any]
    types: Mapping[str, torch.dtype]
    device: torch.device
    ranges: Any


@lru_cache(4096)
def steps(program: Program) -> list[Callable[[list[Any], Given], Tensor]]:
    """Return for each node what computes it, from the values of earlier nodes."""
    return [_step(program, node, kind) for node, kind in zip(program.nodes, program.kinds, strict=True)]


def _step(program: Program, node: Node, kind: str) -> Callable[[list[Any], Given], Tensor]:
    args = operands(node)
    match node[0]:
        case "in":
            return lambda values, x: _input(node[1], kind, x)
        case "lit":
            number = literal(node)  # by torch.full, as torch.tensor would copy from the host
            return lambda values, x: torch.full((), number, dtype=x.types[kind], device=x.device)
        case "load":
            t, letters = node[1], letters_of(program, node)
            return lambda values, x: x.tensors[t][
                view(letters, x.tensors[t], x.ranges) or tuple([values[n] for n in args])
            ].to(x.types[kind])
        case "cast":
            return lambda values, x: values[args[0]].to(x.types[kind])
    compute = OPS[node[0]].torch
    return lambda values, x: compute(*[values[n] for n in args])


def _input(name: str, kind: str, x: Given) -> Tensor:
    found = x.inputs.get(name)
    if found is None:
        found = x.numbers[int(name[1:])]
    return found if isinstance(found, Tensor) else torch.full((), found, dtype=x.types[kind], device=x.device)


def keep(program: Program, at: Entries, tensors: Sequence[Tensor] = (), numbers: Sequence[Any] = ()) -> Tensor:
    """Return a bool tensor that broadcasts to (B, H, M, N): whether row i sees key j."""
    return run(program, at._asdict(), tensors, numbers)[0]


def apply(
    program: Program, S: Tensor, at: Entries, tensors: Sequence[Tensor] = (), numbers: Sequence[Any] = ()
) -> Tensor:
    """Return the output logits for S (B, H, M, N), in its shape and type."""
    return run(program, at._asdict() | {"s": S}, tensors, numbers, S.dtype)[0].expand(S.shape)


def zero_sums(tensors: Sequence[Tensor], real: torch.dtype) -> dict[int, Tensor]:
    """Return zeros of type `real` for each captured tensor that requires a gradient, by its place."""
    return {n: torch.zeros_like(t, dtype=real) for n, t in enumerate(tensors) if t.requires_grad}


def pull(
    program: Program,
    dS: Tensor,
    S: Tensor,
    at: Entries,
    sums: Mapping[int, Tensor],
    tensors: Sequence[Tensor] = (),
    numbers: Sequence[Any] = (),
) -> Tensor:
    """Return the gradient of the input logits S, from that of the output logits, both (B, H, M, N).

    sums: gradients of captured tensors in S's type, by their places; those of these entries are added to them.
    """
    learned = tuple(sums)
    loads = gathers(program, learned)
    derived = derivative(program.text, learned, indices=True)
    dS_in, *rest = run(derived, at._asdict() | {"s": S, "g": dS}, tensors, numbers, S.dtype)
    values, indices = rest[: len(loads)], iter(rest[len(loads) :])
    for n, found in zip(loads, values, strict=True):
        index = tuple([next(indices) for _ in operands(program.nodes[n])])
        total, value = sums[program.nodes[n][1]], _of_seen(found.expand(S.shape), at)
        own = view(letters_of(program, program.nodes[n]), total, at.ranges)
        if own is None:
            _add(total, index, value)
        else:
            total[own].add_(value.sum_to_size(total[own].shape))
    return _of_seen(dS_in.expand(S.shape), at)


def _of_seen(value: Tensor, at: Entries) -> Tensor:
    """Return gradients, 0 where the mask hides an entry: a factor of 0 may be NaN there."""
    return value if at.seen is None else value.masked_fill(~at.seen, 0.0)


@lru_cache(4096)
def letters_of(program: Program, node: Node) -> tuple[Any, ...] | None:
    """Return where each index of what a node reads is among b, h, i and j, or (number,); None for other indices.

    They are in order; some may be left out.
    """
    found: list[Any] = []
    last = -1
    for x in operands(node):
        name, index = program.nodes[x][:2]
        place = PLACES.get(index, -1) if name == "in" else -1
        if name != "lit" and place <= last:
            return None
        last = max(last, place)
        found.append((index,) if name == "lit" else place)
    return tuple(found)


PLACES = {"b": 0, "h": 1, "i": 2, "j": 3}


def view(letters: tuple[Any, ...] | None, t: Tensor, ranges: Any) -> tuple[Any, ...] | None:
    """Return the index of a view of a tensor, (B, H, M, N) or 1 in place of these; None if it is no view."""
    if letters is None or ranges is None:
        return None
    found: list[Any] = []
    place = 0
    for at, size in zip(letters, t.shape, strict=True):
        if type(at) is tuple:
            found += at
        elif ranges[at].stop > size:
            return None  # which the index tensors refuse
        else:
            found += [None] * (at - place) + [ranges[at]]
            place = at + 1
    return *found, *[None] * (4 - place)


def _add(total: Tensor, index: tuple[Tensor, ...], value: Tensor) -> None:
    """Add to total[index], after sums over what the index does not depend on: they are more exact, and faster."""
    if not index:
        total += value.sum()
        return
    shape = torch.broadcast_shapes(*[x.shape for x in index])
    total.index_put_(index, value.sum_to_size(shape), accumulate=True)
