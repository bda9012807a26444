"""Reads a kernel's Triton IR for products of 32-bit integers that reach an address.

From what is added to a pointer it goes back through sums, products, choices and loops. A quotient, a remainder or a
number from memory begins again. Products of numbers that are known to be small, such as a row of a tile times its
width, are left out.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

INF = float("inf")
PASSES = {
    "addi", "subi", "muli", "extsi", "extui", "trunci", "select", "minsi", "maxsi", "shli", "splat", "broadcast",
    "expand_dims", "reshape", "trans", "convert_layout", "reduce", "scan", "region",
}  # fmt: skip
"""Operations whose result is as large as what goes in, or larger."""
LOCATION = re.compile(r"\s*\bloc\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)")
NAME = re.compile(r"%[\w-]+(?:#\d+)?")


@dataclass(eq=False)
class Value:
    """What a value is made of: an operation, the values before it, a number it holds, its type and its place."""

    op: str = ""
    before: list["Value"] = field(default_factory=list)
    number: int | None = None
    type: str = ""
    place: str = ""

    def bound(self, depth: int = 12) -> float:
        """The largest it can be without its sign, or infinity."""
        if self.number is not None:
            return abs(self.number)
        if depth == 0 or not self.before:
            return INF
        sizes = [value.bound(depth - 1) for value in self.before]
        match self.op:
            case "muli":
                return sizes[0] * sizes[1] if 0 not in sizes else 0
            case "addi" | "subi":
                return sum(sizes)
            case "remsi":
                return sizes[1]
            case "andi":
                return min(sizes)
            case "minsi" | "maxsi" | "divsi" | "extsi" | "splat" | "broadcast" | "expand_dims" | "reshape":
                return max(sizes) if self.op != "divsi" else sizes[0]
        return INF


@dataclass
class Region:
    """An operation with regions: its results, and the arguments of its first and of its second one."""

    op: str
    results: list[Value]
    arguments: list[Value] = field(default_factory=list)
    second: list[Value] = field(default_factory=list)


class Reader:
    """The values of a kernel by name, in the scopes of its regions."""

    def __init__(self, text: str) -> None:
        self.scopes: list[dict[str, Value]] = [{}]
        self.regions: list[Region] = []
        self.captured: list[Value] = []
        self.offsets: list[Value] = []
        for line in text.splitlines():
            if not line.startswith("#"):
                self.read(LOCATION.sub("", line).strip(), line)

    def find(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise KeyError(name)

    def define(self, name: str, value: Value | None = None) -> Value:
        self.scopes[-1][name] = value = value or Value("region")
        return value

    def open(self, region: Region) -> None:
        self.regions.append(region)
        self.scopes.append({})

    def close(self) -> Region:
        self.scopes.pop()
        return self.regions.pop()

    def read(self, line: str, whole: str) -> None:
        """One line, without its places and with them."""
        if line.startswith("}"):
            region = self.close()
            if line.startswith(("} else", "} do")):
                self.open(region)
        elif line.startswith("^bb"):
            names = NAME.findall(line)
            assert not names or self.regions[-1].op in ("while", "reduce", "scan"), f"a block with arguments: {line}"
            for n, name in enumerate(names):
                self.define(name, self.regions[-1].second[n] if self.regions[-1].op == "while" else None)
        elif line.startswith(("scf.yield", "scf.condition")):
            self.hand_on(line)
        elif line.startswith("tt.func"):
            self.open(Region("func", []))
            for name in NAME.findall(line):
                self.define(name, Value("argument"))
        elif line.startswith("ttg.warp_specialize"):
            self.captured = [self.find(name) for name in NAME.findall(line.partition(")")[0])]
        elif line.startswith("partition"):
            self.open(Region("partition", []))
            for name, value in zip(NAME.findall(line), self.captured, strict=True):
                self.define(name, value)
        elif made := re.match(r"(?:(%[^=]+) = )?\"?(?:\w+\.)?(\w+)\"?(.*)", line):
            self.operation(*made.groups(), whole)

    def operation(self, made: str | None, op: str, rest: str, whole: str) -> None:
        """An operation, what it makes, and the region that it opens."""
        names = []
        for name, _, count in (one.partition(":") for one in (made or "").split(", ") if one):
            names += [f"{name}#{n}" for n in range(int(count))] if count else [name]
        if op in ("for", "while", "if"):
            self.loop_or_choice(op, [self.define(name) for name in names], rest)
            return
        number = re.search(r"(?:dense<| |^)(-?\d+)>? :", rest) if op == "constant" else None
        number = number or (re.search(r"end = (\d+)", rest) if op == "make_range" else None)
        takes = not rest.endswith("{") or op in ("reduce", "scan")
        given = [self.find(name) for name in NAME.findall(rest)] if takes else []
        value = Value(op, given, int(number.group(1)) if number else None, rest.rpartition(" : ")[2], whole)
        if op == "select":
            value.before = given[1:]
        if op == "addptr":
            self.offsets.append(given[1])
        for name in names:
            self.define(name, value)
        if rest.endswith(("{", "({")):
            self.open(Region(op, []))

    def loop_or_choice(self, op: str, results: list[Value], rest: str) -> None:
        """A loop begins with what it carries; its results, and those of a choice, come at its end."""
        counted = re.match(r" (%[\w-]+) = (%[\w-]+(?:#\d+)?) to (%[\w-]+(?:#\d+)?)", rest)
        carried = re.findall(r"(%[\w-]+) = (%[\w-]+(?:#\d+)?)", rest.partition("iter_args")[2] if counted else rest)
        starts = [self.find(start) for _, start in carried]
        if op == "for":  # it may end before its first round
            for value, start in zip(results, starts, strict=True):
                value.before.append(start)
        limits = [self.find(name) for name in counted.groups()[1:]] if counted else []
        arguments = [Value("region", [start]) for start in starts]
        self.open(Region(op, results, arguments, [Value("region") for _ in results]))
        for (name, _), value in zip(carried, arguments, strict=True):
            self.define(name, value)
        if counted:
            self.define(counted.group(1), Value("region", limits))

    def hand_on(self, line: str) -> None:
        """What a region gives to its operation and to its next round."""
        region = self.regions[-1]
        given = [self.find(name) for name in NAME.findall(line)]
        if line.startswith("scf.condition"):
            targets = [region.results, region.second]
            given = given[1:]
        elif region.op == "while":
            targets = [region.arguments]
        else:
            targets = [region.results, region.arguments]
        for target in targets:
            for value, source in zip(target, given, strict=False):
                value.before.append(source)


def products(text: str) -> Iterator[tuple[str, str]]:
    """File and source of every product that reaches an address and may pass 2^31."""
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    todo, seen = list(Reader(text).offsets), set()
    while todo:
        value = todo.pop()
        if id(value) in seen or value.op not in PASSES:
            continue
        seen.add(id(value))
        todo += value.before
        if value.op in ("muli", "shli") and re.search(r"\bi32$|xi32\b", value.type) and value.bound() >= 2**31:
            yield source(value.place, places)


def source(line: str, places: dict[str, str]) -> tuple[str, str]:
    """Where a product of IR comes from: the file in the package or the studies, and the longest product there."""
    (place,) = re.findall(r"loc\((.*)\)$", line.rstrip())
    while not (found := re.match(r"\"([^\"]+\.py)\":(\d+):(\d+)", place)):
        if place.startswith('"<tilewise program'):  # an emitted function, which is in no file
            return "host/emit.py", "a product of a program"
        inner = re.search(r"#loc\d*", place)
        assert inner, place
        place = places[inner.group()]
    path, row, column = Path(found.group(1)), int(found.group(2)), int(found.group(3))
    place = row, column
    around = [x for x in nodes_of(path) if (x.lineno, x.col_offset) <= place <= (x.end_lineno, x.end_col_offset)]
    assert around, f"{path}:{row}:{column} is no product"
    longest = max(around, key=lambda x: x.end_col_offset - x.col_offset)
    file = path.as_posix().rpartition("/tilewise/")[2]
    _, study, inside = file.rpartition("/studies/")
    return study.removeprefix("/") + inside, ast.unparse(longest)


@cache
def nodes_of(path: Path) -> list[ast.BinOp]:
    """The products of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.LShift)]
