"""Joined programs: several masks become one by `and`, `or` and `not`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .program import INPUTS, Builder, Program, operands, with_operands


class Aligned(NamedTuple):
    """A mask's program, the tensors that it reads, the numbers given to it, and what its rows count from."""

    program: Program
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    align: str
    """"first": i counts from the first row; "last": the last row's i is the last key's j."""


def join(op: str, parts: Sequence[Aligned]) -> Aligned:
    """Return masks joined by an operation; a single one by "not".

    A tensor that several of them read is captured once. Where they count rows differently, those with rows from 0 read
    i - shift.
    """
    aligns = {part.align for part in parts if _counts_rows(part.program)}
    align = aligns.pop() if len(aligns) == 1 else "last"
    build, tensors, numbers = Builder(), [], []
    for part in parts:
        tensors += [t for t in part.tensors if not any([t is other for other in tensors])]
    outputs = []
    for part in parts:
        at = [next(n for n, other in enumerate(tensors) if other is t) for t in part.tensors]
        outputs.append(build.wrap(_copied(build, part, at, len(numbers), align)))
        numbers += part.numbers
    joined = outputs[0].op(op) if len(outputs) == 1 else outputs[0]
    for other in outputs[1:]:
        joined = joined.op(op, other)
    return Aligned(build.done([joined.n]), tuple(tensors), tuple(numbers), align)


def _counts_rows(program: Program) -> bool:
    return not program.reads[program.outputs[0]].isdisjoint({"i", "shift"})


def _copied(build: Builder, part: Aligned, places: Sequence[int], first: int, align: str) -> int:
    """Add a mask's nodes and return its output's number. Its tensors are at `places`, its numbers from `first` on."""
    at: list[int] = []
    for node in part.program.nodes:
        new: Any = with_operands(node, [at[x] for x in operands(node)])
        if node[0] == "load":
            new = ("load", places[node[1]], *new[2:])
        elif node[0] == "in" and node[1] not in INPUTS:
            new = ("in", f"{node[1][0]}{first + int(node[1][1:])}")
        n = build.add(new)
        if node == ("in", "i") and part.align != align:
            n = (build.wrap(n) - build.wrap(build.add(("in", "shift")))).n
        at.append(n)
    return at[part.program.outputs[0]]
