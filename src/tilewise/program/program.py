"""Program: what a mask or a score computes for one entry, as a text; Builder, which makes programs.

A program is a tuple of nodes, each of which reads earlier ones by their numbers, and the numbers of its outputs:

    ("in", name)             s, b, h, i, j; g, a gradient; f0, i1, ..., numbers that a call brings, by kind and place;
                             shift, N - M, where functions with rows from 0 and from the last key's are joined
    ("lit", number)          bool, int or float; "inf", "-inf" and "nan" are strings, for literals have no other form
    ("cast", kind, x)        x as another kind: "f" floating, "i" whole, "b" bool
    ("load", t, kind, *x)    captured tensor t at the indices x, all whole numbers
    (name, *x)               an operation of ops.OPS; its operands have the kinds that it takes
"""

import ast
import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from .ops import OPS

Node = tuple[Any, ...]
FIRST_OPERAND = {"in": 2, "lit": 2, "cast": 2, "load": 3}
INPUTS = {"s": "f", "b": "i", "h": "i", "i": "i", "j": "i", "shift": "i"}
"""The kinds of parameters and of shift. Other inputs begin with the letter of their kind, or with g: floating."""
WIDTH = {"b": 0, "i": 1, "f": 2}
CONVERT: dict[str, Callable[[Any], Any]] = {"b": bool, "i": int, "f": float}
NEUTRAL_RIGHT = {"add": 0, "sub": 0, "mul": 1, "div": 1, "idiv": 1, "or": 0, "xor": 0, "shl": 0, "shr": 0}
NEUTRAL_LEFT = {"add": 0, "mul": 1, "or": 0, "xor": 0}
"""Neutral elements on either side. That -0.0 + 0.0 is 0.0 is ignored."""
OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}
"""What arithmetic on two bools is, as in torch."""
NOT_OF_BOOLS = ("sub", "neg", "abs", "mod")


def operands(node: Node) -> tuple[int, ...]:
    """Return the numbers of the nodes that a node reads."""
    return node[FIRST_OPERAND.get(node[0], 1) :]


def with_operands(node: Node, new: Sequence[int]) -> Node:
    """Return the node with other operands."""
    return node[: FIRST_OPERAND.get(node[0], 1)] + tuple(new)


def literal(node: Node) -> Any:
    """Return the number that a node is, None if it is no literal."""
    if node[0] != "lit":
        return None
    return float(node[1]) if isinstance(node[1], str) else node[1]


def kind_of(node: Node, kinds: Sequence[str]) -> str:
    """Return the kind of a node, from those of the earlier nodes."""
    op, *rest = node
    match op:
        case "in":
            name: str = rest[0]
            return INPUTS[name] if name in INPUTS else name[0].replace("g", "f")
        case "lit":
            return "b" if isinstance(rest[0], bool) else "i" if isinstance(rest[0], int) else "f"
        case "load":
            return rest[1]
        case "cast":
            return rest[0]
    gives, last = OPS[op].gives, int(rest[-1])
    return kinds[last] if gives == "=" else gives


class Program:
    """Nodes and outputs. Programs of equal text are equal; a program is pickled as its text."""

    def __init__(self, nodes: tuple[Node, ...], outputs: tuple[int, ...]) -> None:
        self.nodes, self.outputs = nodes, outputs

    @cached_property
    def text(self) -> str:
        """Return the program as a literal, from which `decode` makes it again."""
        return repr((self.nodes, self.outputs)).replace(" ", "")

    @cached_property
    def kinds(self) -> list[str]:
        """Return the kind of every node."""
        kinds: list[str] = []
        for node in self.nodes:
            kinds.append(kind_of(node, kinds))
        return kinds

    @cached_property
    def reads(self) -> list[frozenset[str]]:
        """Return for every node the names of the inputs that it depends on."""
        found: list[frozenset[str]] = []
        for node in self.nodes:
            own = {node[1]} if node[0] == "in" else ()
            found.append(frozenset(own).union(*[found[x] for x in operands(node)]))
        return found

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """Return the numbers of the nodes that read captured tensors."""
        return tuple([n for n, node in enumerate(self.nodes) if node[0] == "load"])

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Program) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return decode, (self.text,)

    def __repr__(self) -> str:
        return f"decode({self.text!r})"


@lru_cache(4096)
def decode(text: str) -> Program:
    """Return the program of a text."""
    return Program(*ast.literal_eval(text))


class Expr:
    """A node of a Builder, with Python's operators: `x * y` adds a node, and returns it."""

    __slots__ = ("build", "n")

    def __init__(self, build: "Builder", n: int) -> None:
        self.build, self.n = build, n

    @property
    def kind(self) -> str:
        """Return the node's kind."""
        return self.build.kinds[self.n]

    def op(self, name: str, *others: Any) -> Any:
        """Return an operation of ops.OPS on this node and others, or numbers."""
        return self.build.op(name, self, *others)

    def cast(self, kind: str) -> Any:
        """Return the node as another kind."""
        return self.build.wrap(self.build.add(("cast", kind, self.n)))

    def __floordiv__(self, other: Any) -> Any:
        return self.build.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.build.floor_divide(other, self)

    def __invert__(self) -> Any:
        return self.op("not") if self.kind == "b" else self.op("xor", -1)

    def __pos__(self) -> Any:
        return self

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: self.build.op(name, self, *others)


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: self.build.op(name, other, self)


OPERATORS = {"truediv": "div", "lshift": "shl", "rshift": "shr"} | {
    name: name for name in ("add", "sub", "mul", "mod", "and", "or", "xor")
}
"""Python's operators with two operands in any order, by their names without underscores."""
for _name, _op in OPERATORS.items():
    setattr(Expr, f"__{_name}__", _operator(_op))
    setattr(Expr, f"__r{_name}__", _reflected(_op))
for _name in ("neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Expr, f"__{_name}__", _operator(_name))


class Builder:
    """Makes a program node by node: equal nodes once, numbers folded, neutral elements dropped."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.kinds: list[str] = []
        self.number_of: dict[Node, int] = {}

    def wrap(self, n: int) -> Any:
        """Return node n with operators."""
        return Expr(self, n)

    def refuse(self, what: str) -> Exception:
        """Return the error for an operation that programs do not have."""
        return ValueError(what)

    def lift(self, x: Any) -> int:
        """Return the node of a number or an Expr."""
        return x.n if isinstance(x, Expr) else self.literal(x)

    def literal(self, number: Any) -> int:
        """Return the node of a number."""
        finite = not isinstance(number, float) or math.isfinite(number)
        return self.add(("lit", number if finite else str(number)))

    def number(self, x: Any) -> Any:
        """Return the number that x is, None if it is a node that is none."""
        return literal(self.nodes[x.n]) if isinstance(x, Expr) else x

    def op(self, name: str, *args: Any) -> Any:
        """Return an operation on numbers or nodes, which are converted to the kinds that it takes."""
        row = OPS[name]
        some = [self.lift(x) for x in args]
        first = [self.cast("b", some.pop(0))] if name == "where" else []
        kind = row.takes
        if kind not in WIDTH:
            kinds = [self.kinds[n] for n in some]
            kind = kinds[0] if len(kinds) == 1 or kinds[0] == kinds[1] else max(kinds, key=WIDTH.__getitem__)
        if row.takes in ("i", "ib") and "f" in [self.kinds[n] for n in some]:
            raise self.refuse(f"`{name}` takes bools or whole numbers, not floating ones; convert them with .long()")
        if kind == "b" and name in NOT_OF_BOOLS:
            raise self.refuse(f"`{name}` does not take bools; convert them with .long(), or write ~x, x ^ y")
        if kind == "b":
            name = OF_BOOLS.get(name, name)
        some = [n if self.kinds[n] == kind else self.cast(kind, n) for n in some]
        return self.wrap(self.add((name, *first, *some)))

    def cast(self, kind: str, n: int) -> int:
        """Return node n as another kind."""
        return self.add(("cast", kind, n))

    def floor_divide(self, x: Any, y: Any) -> Any:
        """Return x // y, rounded down."""
        some = [self.lift(x), self.lift(y)]
        if "f" not in [self.kinds[n] for n in some]:
            return self.op("idiv", x, y)
        return self.op("floor", self.op("div", x, y))

    def add(self, node: Node) -> int:
        """Return the number of a node, or of an equal or simpler one."""
        key = ("lit", repr(node[1])) if node[0] == "lit" else node  # 1, 1.0 and True are equal to Python, 0.0 and -0.0
        found = self.number_of.get(key)
        if found is None:
            simple = self.simpler(node)
            if isinstance(simple, int):
                return simple
            if simple is not node:
                return self.add(simple)
            found = self.number_of[key] = len(self.nodes)
            self.kinds.append(kind_of(node, self.kinds))
            self.nodes.append(node)
        return found

    def simpler(self, node: Node) -> Node | int:
        """Return a simpler node with the same value, the number of one, or the node itself."""
        name, args = node[0], operands(node)
        if not args or name == "load":
            return node
        if name == "cast" and self.kinds[args[0]] == node[1]:
            return args[0]
        numbers = [literal(self.nodes[x]) for x in args]
        if None not in numbers:
            return self.folded(node, numbers)
        if name == "where":
            c, x, y = args
            if x == y:
                return x
            if numbers[0] is not None:
                return x if numbers[0] else y
            if self.nodes[c][0] == "not":
                return ("where", self.nodes[c][1], y, x)
        if name in ("neg", "not") and self.nodes[args[0]][0] == name:
            return self.nodes[args[0]][1]
        if len(args) == 2:
            a, b = numbers
            if b is not None and b == NEUTRAL_RIGHT.get(name):
                return args[0]
            if a is not None and a == NEUTRAL_LEFT.get(name):
                return args[1]
            return self.simpler_pair(node, a, b)
        return node

    def simpler_pair(self, node: Node, a: Any, b: Any) -> Node | int:
        """Return the same for two operands, which are the numbers a and b, or None where they are none."""
        name, x, y = node
        if name == "mul" and -1 in (a, b):
            return ("neg", x if b is not None else y)
        if name in ("and", "or", "min", "max") and x == y:
            return x
        if name in ("and", "or") and self.kinds[x] == "b" and (a is not None or b is not None):
            number, other = (x, y) if a is not None else (y, x)
            decides = literal(self.nodes[number]) == (name == "or")
            return number if decides else other
        return node

    def folded(self, node: Node, numbers: list[Any]) -> Node | int:
        """Return the literal that an operation on numbers is."""
        if node[0] == "cast":
            finite = all([math.isfinite(x) for x in numbers])
            return self.literal(CONVERT[node[1]](*numbers)) if finite or node[1] != "i" else node
        types = {float: torch.float64}
        tensors = [torch.tensor(x, dtype=types.get(type(x)), device="cpu") for x in numbers]
        return self.literal(OPS[node[0]].torch(*tensors).item())

    def copy(self, program: Program) -> list[int]:
        """Add a program's nodes, and return their numbers here."""
        at: list[int] = []
        for node in program.nodes:
            at.append(self.add(with_operands(node, [at[x] for x in operands(node)])))
        return at

    def done(self, outputs: Sequence[int]) -> Program:
        """Return the program of these outputs, without the nodes that none of them needs."""
        alive = set(outputs)
        for n in range(max(outputs), -1, -1):
            if n in alive:
                alive.update(operands(self.nodes[n]))
        at = {n: new for new, n in enumerate(sorted(alive))}
        nodes = [with_operands(self.nodes[n], [at[x] for x in operands(self.nodes[n])]) for n in at]
        return Program(tuple(nodes), tuple([at[n] for n in outputs]))
