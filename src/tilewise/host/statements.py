"""A program's nodes as statements of Triton, one each."""

import math
from typing import Any, NamedTuple

from ..program.ops import OPS
from ..program.program import Program, literal

LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126
"""The largest number of fp32, and the smallest that is not flushed to 0."""
OUTPUT = "fT"
"""The input that is a score's output, which Hopper's derivatives may read in place of s."""
PER_ENTRY = frozenset(("s", "i", "j", "g", OUTPUT))
"""Inputs that differ from entry to entry."""
TANH, SIGMOID = 2.0 / math.log(2.0), 1.0 / math.log(2.0)
"""Factors of the argument with which `saturated` gives tanh and sigmoid - 1/2."""


class Form(NamedTuple):
    """What device functions may rely on, beside the text."""

    rows: str = "last"
    """How i counts rows: "last", as kernels do, the last row being the last key's; "first", from 0."""
    past: bool = False
    """Whether j <= i in all entries that the mask shows."""
    narrow: bool = False
    """Whether all offsets into captured tensors fit 32 bits."""
    wide: bool = False
    """Whether whole numbers, such as i N + j, may need 64 bits."""
    packed: bool = False
    """Whether N - M differs by sequence. Where a program needs it, it captures cu_q and cu_k, else N - M."""
    end: str = ""
    """What is captured so that scores are 0 in a tile's rows behind the last, where P is 0 and logits must be finite:
    "N", "keys" for cu_k, or nothing where they are finite anyway."""
    steps: bool = False
    """On Hopper, whether terms of i - j are subtracted from S one by one. Their sum, made before S is there, would lie
    in registers meanwhile."""


class Sum(NamedTuple):
    """A whole number a i + b j + c, plus a number that is the same for all entries."""

    i: int
    j: int
    c: int = 0
    rest: str = ""

    def times(self, k: int) -> "Sum":
        """Return k times the sum."""
        return Sum(k * self.i, k * self.j, k * self.c, self.rest and _times(k, f"({self.rest})"))

    def plus(self, other: "Sum") -> "Sum":
        """Return the sum of two."""
        rest = " + ".join(filter(None, [self.rest, other.rest]))
        return Sum(self.i + other.i, self.j + other.j, self.c + other.c, rest)

    def written(self, i: str, j: str, whole: bool) -> str:
        """Return it as an expression; unless it is `whole`, without what is the same for all entries."""
        terms = [_times(k, name) for k, name in ((self.i, i), (self.j, j)) if k]
        if whole:
            terms += [self.rest] * bool(self.rest) + [str(self.c)] * bool(self.c)
        terms.sort(key=lambda term: term.startswith("-"))
        return f"({' + '.join(terms)})".replace(" + -", " - ")


def _times(k: int, x: str) -> str:
    return x if k == 1 else f"-{x}" if k == -1 else f"{k} * {x}"


class Product(NamedTuple):
    """A tile, times numbers that are the same for all entries, divided by others."""

    tile: str
    times: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    def scaled(self, number: str, divide: bool) -> "Product":
        """Return it times a number, or divided by it."""
        same, other = (self.by, self.times) if divide else (self.times, self.by)
        if number in other:
            n = other.index(number)
            other = other[:n] + other[n + 1 :]
        else:
            same = (*same, number)
        return Product(self.tile, *((other, same) if divide else (same, other)))

    def factor(self) -> str:
        """Return the number by which the tile is multiplied."""
        return " / ".join([" * ".join(self.times) or "1.0", *self.by])

    def written(self) -> str:
        """Return it as an expression, in which numbers are multiplied first."""
        return f"({self.tile} * ({self.factor()}))" if self.times or self.by else self.tile

    def in_order(self) -> str:
        """Return it as an expression, from left to right."""
        return f"({' / '.join([' * '.join([self.tile, *self.times]), *self.by])})"


class Statements:
    """Writes a program's nodes as statements, one each.

    tile: whether rows are row0 + row and columns column0 + column; row and column are the same in all tiles.
    hopper: whether what differs by tile is computed apart, and what is the same for a tile is multiplied first.
    """

    def __init__(
        self, program: Program, form: Form, inputs: dict[str, str], tile: bool = False, hopper: bool = False
    ) -> None:
        self.nodes, self.kinds, self.reads = program.nodes, program.kinds, program.reads
        self.form, self.inputs, self.tile, self.hopper = form, inputs, tile, hopper
        self.lines: list[str] = []
        self.names: list[str] = []
        self.sums: list[Sum | None] = []
        self.natural: list[bool] = []
        """Whether whole numbers are known not to be negative."""
        self.products: list[Product | None] = []
        for n, node in enumerate(self.nodes):
            self.sums.append(self.sum_of(n, *node))
            self.products.append(self.product_of(n, *node))
            self.names.append(self.simple(n) or self.assign(f"x{n}", self.expression(n, *node)))
            self.natural.append(self.kinds[n] != "f" and self.is_natural(n, *node))

    def assign(self, name: str, expression: str) -> str:
        """Write a statement, and return the name that it assigns to."""
        self.lines.append(f"{name} = {expression}")
        return name

    def is_scalar(self, n: int) -> bool:
        """Tell whether a node is the same number for all entries."""
        return not self.reads[n] & PER_ENTRY

    def simple(self, n: int) -> str | None:
        """Return the name of an input, a literal, or a node that equals another."""
        match self.nodes[n]:
            case "in", name:
                return self.inputs.get(name, f"({name} != 0)" if self.kinds[n] == "b" else name)
            case "lit", _:
                return _number(literal(self.nodes[n]))
            case "detach", x:
                return self.names[x]
            case "abs", x if self.natural[x]:
                return self.names[x]
            case "where", c, zero, x if self.guards(c, zero, x):
                return self.names[x]
        return None

    def guards(self, c: int, zero: int, x: int) -> bool:
        """Tell whether where(c, zero, x) only keeps g / f0 at 0 where g is 0, for captured numbers f0 of 0."""
        name, *xs = self.nodes[x]
        by = self.nodes[xs[-1]] if name in ("mul", "div") else ("lit", 0)
        is_zero = self.nodes[c][0] == "eq" and 0.0 == literal(self.nodes[self.nodes[c][2]]) == literal(self.nodes[zero])
        return is_zero and xs[:1] == [self.nodes[c][1]] and by[0] == "in" and self.is_scalar(xs[-1])

    def expression(self, n: int, name: str, *xs: Any) -> str:
        """Return the expression of an operation."""
        found = self.on_hopper(n, name, *xs) if self.hopper else None
        if found:
            return found
        if product := self.products[n]:
            return product.written() if self.hopper or product.tile != "S" else product.in_order()
        match name:
            case "load":
                return self.load(n, *xs)
            case "cast":
                return self.cast(*xs)
            case "idiv" | "mod":
                return self.divide(name, *xs, kind=self.kinds[n])
            case "div" if (y := literal(self.nodes[xs[1]])) and (self.hopper or abs(math.frexp(y)[0]) == 0.5):
                return f"({self.names[xs[0]]} * {_number(1.0 / y)})"
            case "min" | "max" if self.kinds[n] == "f" and OUTPUT not in self.reads[n]:
                a, b = [self.names[x] for x in xs]
                return f"tl.{name}imum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)"
            case "lt" | "le" | "gt" | "ge" if self.kinds[xs[0]] == "b":  # Triton orders bools as 0 and -1
                return OPS[name].triton.format(*[f"tl.cast({self.names[x]}, tl.int32)" for x in xs])
        return OPS[name].triton.format(*[self.names[x] for x in xs])

    def cast(self, kind: str, x: int) -> str:
        """Return x as another kind."""
        if kind == "b":
            return f"({self.names[x]} != 0)"
        types = {"f": "tl.float32", "i": "tl.int64" if self.form.wide else "tl.int32"}
        return f"tl.cast({self.names[x]}, {types[kind]})"

    def divide(self, name: str, x: int, y: int, kind: str) -> str:
        """Return a quotient or a remainder. They round down, where Triton's round to 0."""
        a, b = self.names[x], self.names[y]
        if kind == "f":
            return f"({a} - tl.floor({a} / {b}) * {b})"
        number = literal(self.nodes[y])
        if number and number > 0 and number & (number - 1) == 0:
            return f"({a} >> {number.bit_length() - 1})" if name == "idiv" else f"({a} & {number - 1})"
        if self.natural[x] and self.natural[y]:
            return f"({a} // {b})" if name == "idiv" else f"({a} % {b})"
        return OPS[name].triton.format(a, b)

    def load(self, n: int, t: int, kind: str, *indices: int) -> str:
        """Return a read of a captured tensor. What is the same for all entries comes first in the offset, and
        on Hopper, then what differs by tile."""
        terms: tuple[list[str], ...] = [], [], []
        checks = []
        splits = [self.split(x) if self.natural[x] else None for x in indices]
        narrow = self.form.narrow and not any(splits)  # a sum in parts is extended to 64 bits in parts
        for axis, (x, split) in enumerate(zip(indices, splits, strict=True)):
            at, check = self.index(f"y{n}_{axis}", t, axis, x)
            checks += [check] * bool(check)
            apart = self.hopper and split
            pieces = [(1, apart[0]), (2, apart[1])] if apart else [(0 if self.is_scalar(x) else 2, at)]
            for place, piece in pieces:
                index = piece if narrow else f"tl.cast({piece}, tl.int64)"
                terms[place].append(f"{index} * t{t}_stride{axis}")
        offset = " + ".join([*terms[0], *terms[1], *terms[2]])
        mask = f", mask={' & '.join(checks)}, other=0" if checks else ""
        found = f"tl.load(t{t} + ({offset}){mask})" if offset else f"tl.load(t{t})"
        return {"f": f"tl.cast({found}, tl.float32)", "i": f"whole({found})", "b": f"({found} != 0)"}[kind]

    def index(self, name: str, t: int, axis: int, x: int) -> tuple[str, str]:
        """Return node x as an index into an axis of a captured tensor, and whether it lies inside, if that is to be
        asked. A negative one becomes `name`, counted from the end."""
        at, size = self.names[x], f"t{t}_size{axis}"
        if self.nodes[x] in (("in", "b"), ("in", "h")):
            return at, ""
        if not self.natural[x]:
            at = self.assign(name, f"tl.where({at} < 0, {at} + {size}, {at})")
        elif not self.form.past:  # else entries that the mask hides may be j > i
            return at, f"({at} < {size})"
        return at, f"inside({at}, {size})"

    def sum_of(self, n: int, name: str, *xs: Any) -> Sum | None:
        """Return a whole number that depends on i or j as a sum, if it is one."""
        if self.kinds[n] != "i" or self.is_scalar(n):
            return None
        if name == "in":
            return Sum(int(xs[0] == "i"), int(xs[0] == "j"))
        if name not in ("add", "sub", "neg", "mul", "abs"):
            return None
        first, last = self.term(xs[0]), self.term(xs[-1])
        if first is None or last is None:
            return None
        match name:
            case "add":
                return first.plus(last)
            case "sub":
                return first.plus(last.times(-1))
            case "neg":
                return first.times(-1)
            case "abs":
                return first if self.natural[xs[0]] else None
        numbers = [literal(self.nodes[x]) for x in xs]
        if numbers[0] is not None:
            return last.times(numbers[0])
        return None if numbers[1] is None else first.times(numbers[1])

    def term(self, n: int) -> Sum | None:
        """Return a term of a sum, if it is one."""
        number = literal(self.nodes[n])
        if number is not None:
            return Sum(0, 0, number)
        return Sum(0, 0, 0, self.names[n]) if self.is_scalar(n) else self.sums[n]

    def split(self, n: int) -> tuple[str, str] | None:
        """Return a whole number in two parts: one that differs by tile, one that is the same in all tiles."""
        found = self.sums[n]
        if found is None or not self.tile or not (found.i or found.j):
            return None
        return found.written("row0", "column0", True), found.written("row", "column", False)

    def is_natural(self, n: int, name: str, *xs: Any) -> bool:
        """Tell whether a whole number, or a bool, is known not to be negative."""
        if self.kinds[n] == "b":
            return True
        own = [self.natural[x] for x in xs if type(x) is int and x < n] if name not in ("in", "lit", "load") else []
        total = self.sums[n]
        match name:
            case "in":
                return xs[0] in ("b", "h", "j") or (xs[0] == "i" and self.form.rows != "last")
            case "lit":
                return xs[0] >= 0
            case "add" | "mul" | "idiv" | "min" | "or" | "xor" if all(own):
                return True
            case "max" | "and":
                return any(own)
            case "mod":
                return own[1]
            case "shl" | "shr":
                return own[0]
            case "where":
                return all(own[1:])
            case "abs":
                return True
            case "cast":
                return self.kinds[xs[1]] == "b"
        return self.form.past and total is not None and total.i == -total.j > 0 and total.c >= 0 and not total.rest

    def product_of(self, n: int, name: str, *xs: Any) -> Product | None:
        """Return a tile times numbers, if a node is one. Then the numbers are multiplied first."""
        if name == "in":
            return {"s": Product("S", ("unit",)), "g": Product("dS"), OUTPUT: Product("T")}.get(xs[0])
        if name not in ("mul", "div") or self.kinds[n] != "f" or self.is_scalar(n):
            return None
        x, y = xs if name == "div" or self.is_scalar(xs[1]) else xs[::-1]
        if self.is_scalar(y):
            found = self.products[x]
            return found and found.scaled(self.names[y], name == "div")
        scaled = [(p, other) for p, other in ((self.products[x], y), (self.products[y], x)) if p and (p.times or p.by)]
        if name == "div" or len(scaled) != 1:  # squares of numbers may overflow
            return None
        ((found, other),) = scaled
        return found._replace(tile=self.assign(f"p{n}", f"({found.tile} * {self.names[other]})"))

    # Hopper

    def on_hopper(self, n: int, name: str, *xs: Any) -> str | None:
        """Return an expression that suits Hopper better than the usual one, if there is one."""
        if split := self.split(n):
            return self.at_a_place(n) or f"({split[0]} + {split[1]})"
        if name == "cast" and xs[0] == "f":
            return self.real(xs[1])
        if name in ("tanh", "sigmoid") and "s" in self.reads[n]:
            return self.saturated(n, "1.0") if name == "tanh" else f"(0.5 + {self.saturated(n, '0.5')})"
        if name in ("add", "sub") and self.form.steps and "s" in self.reads[xs[0]] and (terms := self.terms(xs[1])):
            sign = "+" if name == "add" else "-"
            return f"({f' {sign} '.join([self.names[xs[0]], *terms])})"
        if name == "mul" and self.is_scalar(xs[0]) != self.is_scalar(xs[1]):
            by, x = xs if self.is_scalar(xs[0]) else xs[::-1]
            if self.nodes[x][0] == "tanh" and "s" in self.reads[x]:
                return self.saturated(x, self.names[by])
            if terms := self.terms(n):
                return f"({' + '.join(terms)})"
        return None

    def at_a_place(self, n: int) -> str | None:
        """Return i - j plus a number of the call, where rows and keys count from a place: a number of the row less one
        of the key, which take fewer registers than parts."""
        found: Any = self.sums[n]
        if not (found.rest and found.i == -found.j == 1):
            return None
        key = found.times(-1)._replace(i=0).written("", "(column0 + column)", True)
        return f"((row0 + row) - {key})"

    def terms(self, n: int) -> list[str]:
        """Return the terms of a number times a whole number that `split` divides."""
        name, *xs = self.nodes[n]
        if name != "mul" or self.is_scalar(xs[0]) == self.is_scalar(xs[1]):
            return []
        by, x = xs if self.is_scalar(xs[0]) else xs[::-1]
        node = self.nodes[x]
        split = self.split(node[2]) if node[:2] == ("cast", "f") else None
        return [f"{self.names[by]} * tl.cast({part}, tl.float32)" for part in split or ()]

    def saturated(self, n: int, limit: str) -> str:
        """Return `limit` times tanh, or limit 2 (sigmoid - 1/2)."""
        name, x = self.nodes[n]
        product = self.products[x] or Product(self.names[x])
        product = product._replace(times=(str(TANH if name == "tanh" else SIGMOID), *product.times))
        return f"saturated({product.written()}, {limit})"

    def real(self, x: int) -> str | None:
        """Return a whole number as a floating one, exact below 2^24, in parts that are each converted once."""
        if (split := self.split(x)) and not self.at_a_place(x):
            return "(tl.cast({}, tl.float32) + tl.cast({}, tl.float32))".format(*split)
        if self.nodes[x][0] in ("abs", "neg") and (found := self.real(self.nodes[x][1])):
            return OPS[self.nodes[x][0]].triton.format(found)
        return None


def _number(x: Any) -> str:
    """Return a literal."""
    if isinstance(x, float) and (not math.isfinite(x) or abs(x) > LARGEST):
        return f'float("{x if math.isnan(x) else math.copysign(math.inf, x)}")'
    if isinstance(x, float) and abs(x) < SMALLEST:
        x = math.copysign(0.0, x)
    return f"({x!r})" if str(x).startswith("-") else repr(x)
