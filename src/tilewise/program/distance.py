"""Take what a score computes from i - j alone out of its program, into a table: one number for each distance.

T5's buckets take 16 operations for each of M N entries of S, but there are M + N distances.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from .program import Builder, Program, decode, literal, operands, with_operands

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LEAVES = ("in", "lit", "cast")
"""Nodes that cost nothing."""
COSTLY = 5
"""Operations of i and j from which on a table is quicker: ALiBi has four, and so would read what it computes."""


class Part(NamedTuple):
    """What is computed for each distance."""

    program: Program
    """Its numbers are those of the score, then the sizes of `sizes`. It is for any i and j of a distance."""
    sizes: tuple[tuple[int, int], ...]
    """The captured tensors and dimensions whose sizes it takes."""
    letters: str
    """Which of b and h it reads; the table's other dimensions have size 1."""


class Split(NamedTuple):
    """A score that reads tables."""

    program: Program
    """It reads the captured tensors `others` and then the tables, at i - j + the last of its numbers."""
    others: tuple[int, ...]
    parts: tuple[Part, ...]


def drifts(program: Program) -> list[int | None]:
    """Return for each node the d of which the node is d i plus a function of i - j; None if there is none."""
    found: list[int | None] = []
    for node, reads in zip(program.nodes, program.reads, strict=True):
        own = [found[x] for x in operands(node)]
        match node[0]:
            case "in":
                d = None if node[1] == "s" else int(node[1] in ("i", "j"))
            case "add" | "sub" if None not in own:
                d = own[0] + own[1] if node[0] == "add" else own[0] - own[1]  # type: ignore[operator]
            case "neg" if own[0] is not None:
                d = -own[0]
            case "mul" if None not in own and any(own):
                by = [literal(program.nodes[x]) for x in operands(node)]
                d = own[1] * by[0] if by[0] is not None else own[0] * by[1] if by[1] is not None else None  # type: ignore[operator]
            case "min" | "max" if own[0] == own[1]:
                d = own[0]
            case "where" if own[0] == 0 and own[1] == own[2]:
                d = own[1]
            case name if name in COMPARISONS and own[0] == own[1] and own[0] is not None:
                d = 0
            case _:
                d = 0 if not any([x != 0 for x in own]) else None
        found.append(d if reads & {"i", "j", "s"} else 0)
    return found


@lru_cache(1024)
def split(text: str, tensors: int, numbers: int) -> Split | None:
    """Return a score, with so many captured tensors and numbers, that reads tables by distance; None if none pays."""
    program = decode(text)
    drift, reads = drifts(program), program.reads
    costs = _costs(program)
    ready = [
        drift[n] == 0 and {"i", "j"} <= reads[n] <= {"b", "h", "i", "j", *_numbers(reads[n])}
        and program.kinds[n] == "f" and costs[n] >= COSTLY
        for n in range(len(program.nodes))
    ]  # fmt: skip
    alive = {*program.outputs}
    for n in range(len(program.nodes) - 1, -1, -1):
        if n in alive and not ready[n]:
            alive.update(operands(program.nodes[n]))
    tables = [n for n in sorted(alive) if ready[n]]
    if not tables:
        return None
    parts = tuple([_part(program, n, numbers) for n in tables])
    build, at = Builder(), []
    for n, node in enumerate(program.nodes):
        if n not in tables:
            at.append(build.add(with_operands(node, [at[x] for x in operands(node)])))
            continue
        k = tables.index(n)
        index = [build.add(("in", c)) if c in parts[k].letters else build.literal(0) for c in "bh"]
        i, j, first = (build.wrap(build.add(("in", name))) for name in ("i", "j", f"i{numbers}"))
        at.append(build.add(("load", tensors + k, "f", *index, (i - j + first).n)))
    left = build.done([at[program.outputs[0]]])
    others = tuple(sorted({left.nodes[n][1] for n in left.loads} - {tensors + k for k in range(len(tables))}))
    places = {t: n for n, t in enumerate((*others, *range(tensors, tensors + len(tables))))}
    nodes = [(node[0], places[node[1]], *node[2:]) if node[0] == "load" else node for node in left.nodes]
    return Split(Program(tuple(nodes), left.outputs), others, parts)


def _numbers(reads: frozenset[str]) -> list[str]:
    """Return the inputs that are numbers of a call."""
    return [name for name in reads if name[1:].isdigit()]


def _costs(program: Program) -> list[int]:
    """Count the operations of each node on what i and j give."""
    below: list[frozenset[int]] = []
    for n, node in enumerate(program.nodes):
        own = {n} if program.reads[n] & {"i", "j"} and node[0] not in LEAVES else set()
        below.append(frozenset(own).union(*[below[x] for x in operands(node)]))
    return [*map(len, below)]


def _part(program: Program, output: int, numbers: int) -> Part:
    """Return one node as a program in which tensors are 0 outside, as kernels read them."""
    build, at, sizes = Builder(), [], []

    def size_of(t: int, dim: int) -> Any:
        if (t, dim) not in sizes:
            sizes.append((t, dim))
        return build.wrap(build.add(("in", f"i{numbers + sizes.index((t, dim))}")))

    for node in program.nodes[: output + 1]:
        index = [at[x] for x in operands(node)]
        if node[0] != "load" or not index:
            at.append(build.add(with_operands(node, index)))
            continue
        exists: Any = build.wrap(build.literal(True))
        for dim, given in enumerate(map(build.wrap, index)):
            size = size_of(node[1], dim)
            x = build.op("where", given < 0, given + size, given)
            inside = (x >= 0) & (x < size)
            exists, index[dim] = exists & inside, build.op("where", inside, x, 0).n
        found = build.wrap(build.add((*node[:3], *index)))
        at.append(build.op("where", exists, found, build.wrap(build.literal(0)).cast(node[2])).n)
    made = build.done([at[output]])
    letters = "".join([c for c in "bh" if c in made.reads[made.outputs[0]]])
    return Part(made, tuple(sizes), letters)
