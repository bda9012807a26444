"""Find uniform registers that a kernel reads although nothing wrote them.

ptxas 12.8 makes such kernels. On a card, a backward of 160 columns with one stage of dO read illegal addresses; with
two stages it was right. `unwritten` reads machine code as cuobjdump prints it, and follows its branches.
"""

import re
from typing import NamedTuple

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
WRITES = re.compile(r"U(?!TMA|BLK|P|ISETP)|R2UR|S2UR|CS2UR|REDUX")
"""What writes its first operand that is no predicate, if that is a uniform register."""
PREDICATE = re.compile(r"!?U?P(\d|T)")
WIDTHS = {".64": 2, ".WIDE": 2, ".128": 4}


class Instruction(NamedTuple):
    """An instruction with the uniform registers that it reads and writes, and the address that it may jump to."""

    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    target: int | None
    ends: bool


def uniform(operand: str, width: int = 1) -> set[int]:
    """The uniform registers of an operand, each the first of `width`."""
    return {int(n) + more for n in re.findall(r"\bUR(\d+)", operand) for more in range(width)}


def instruction(line: str, name: str, rest: str) -> Instruction:
    """Read one. A write under a predicate counts: what reads it has the same predicate."""
    operands = [part.strip() for part in rest.split(",")]
    width = next((n for mark, n in WIDTHS.items() if mark in name), 1)
    first = next((n for n, part in enumerate(operands) if not PREDICATE.fullmatch(part)), 0)
    writes = uniform(operands[first], width) if WRITES.match(name) else set()
    reads: set[int] = set()
    for part in operands[first + 1 if writes else 0 :]:
        if part.startswith("gdesc"):  # the descriptors of both factors; of the right one if registers have the left
            (at,) = uniform(part)
            left = sum(operand.startswith("R") for operand in operands[: operands.index(part)]) < 2
            reads |= {*range(at if left else at + 2, at + 4)}
        else:
            reads |= uniform(part, 2 if name.endswith(".64") and name.startswith("U") else 1)
    jump = re.search(r"0x([0-9a-f]+)$", rest) if name.startswith("BRA") else None
    ends = "@" not in line and name.startswith(("BRA", "EXIT", "RET")) and "," not in rest and "P" not in rest
    return Instruction(f"{name} {rest}", frozenset(reads), frozenset(writes), int(jump[1], 16) if jump else None, ends)


def unwritten(sass: str) -> list[str]:
    """Instructions that read a uniform register, though no path to them writes it."""
    found = [(int(m[1], 16), instruction(m[0], m[2], m[3])) for m in LINE.finditer(sass)]
    at = {address: n for n, (address, _) in enumerate(found)}
    code = [each for _, each in found]
    ways = [[*([] if each.ends else [n + 1]), *([at[each.target]] if each.target is not None else [])]
            for n, each in enumerate(code)]  # fmt: skip
    known: list[frozenset[int] | None] = [None] * len(code)
    waiting, known[0] = [0], frozenset()
    while waiting:
        n = waiting.pop()
        after = known[n] | code[n].writes  # type: ignore[operator]
        for m in ways[n]:
            if m < len(code) and (known[m] is None or not after <= known[m]):  # type: ignore[operator]
                known[m] = after | (known[m] or frozenset())
                waiting.append(m)
    return [each.text for each, before in zip(code, known, strict=True) if before is not None and each.reads - before]
