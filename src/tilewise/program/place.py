"""Programs at a place of a larger call: in place of b, h, i and j they read these plus numbers of the call.

The numbers stand outside of the text, so that another place has the same text, and compiles nothing.
"""

from functools import lru_cache

from .program import INPUTS, Builder, Program, decode, operands, with_operands


@lru_cache(1024)
def moved(text: str, count: int, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the program that reads name + number for each of some inputs, and those that it reads, in order.

    Their numbers come after the `count` that the program gets already. Where i is moved, rows count from the whole's
    first, and N - M, its `shift`, is 0.
    """
    program = decode(text)
    read = tuple([name for name in names if name in program.reads[program.outputs[0]]])
    new = {name: ("in", f"i{count + n}") for n, name in enumerate(read)}
    build, at = Builder(), []
    for node in program.nodes:
        n = build.add(with_operands(node, [at[x] for x in operands(node)]))
        name = node[1] if node[0] == "in" else None
        if name in new:
            n = (build.wrap(n) + build.wrap(build.add(new[name]))).n
        elif name == "shift" and "i" in names:
            n = build.literal(0)
        at.append(n)
    return build.done([at[program.outputs[0]]]).text, read


@lru_cache(1024)
def indices(text: str, count: int) -> list[list[dict[str, tuple[int, ...]]]]:
    """Return for the dimensions of each of `count` captured tensors "B", "H" and "N" if b, h and j index it.

    Each has the numbers of the call that are added to the index.
    """
    program = decode(text)
    found: list[list[dict[str, tuple[int, ...]]]] = [[] for _ in range(count)]
    for node in [program.nodes[n] for n in program.loads]:
        index = operands(node)
        found[node[1]] = found[node[1]] or [{} for _ in index]
        for x, dim in zip(index, found[node[1]], strict=True):
            letter, numbers = indexed(program, x)
            if letter in ("B", "H", "N"):
                dim[letter] = numbers
    return found


def indexed(program: Program, n: int) -> tuple[str, tuple[int, ...]]:
    """Return "B", "H" or "N" if node n is b, h or j plus numbers of the call, "" of these alone, else "?".

    Beside it, which numbers these are.
    """
    op, *rest = program.nodes[n]
    if op == "in":
        name = rest[0]
        if name in INPUTS:
            return {"b": "B", "h": "H", "j": "N"}.get(name, "?"), ()
        return ("", (int(name[1:]),)) if name[0] == "i" else ("?", ())
    if op != "add":
        return "?", ()
    (x, some), (y, others) = [indexed(program, m) for m in rest]
    return (x + y, some + others) if "?" not in (x, y) and len(x + y) < 2 else ("?", ())
