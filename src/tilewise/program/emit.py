"""Programs as device functions, whose source is made from the program's text alone.

    keep(b, h, i, j, *captured)             of a mask, as those of tile/masks.py
    fn(S, unit, at, *captured)              of a score, as those of tile/scores.py
    grad(dS, S, T, unit, at, *captured)

`arguments` returns what they captured. Reads outside a captured tensor give 0; b and h are not compared with its sizes.
Whole numbers have 32 bits unless literals, 64-bit tensors or `Form.wide` need more; floating ones are fp32.
"""

import hashlib
import linecache
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..tile.scores import tanh
from .derive import derivative
from .ops import OPS
from .program import Builder, Program, decode, literal, operands, with_operands

LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-126
"""The largest number of fp32, and the smallest that is not flushed to 0."""
OPEN = 1 << 30
"""No row or key is so far out (tile/masks.py)."""
OUTPUT = "fT"
"""The input that is a score's output, which Hopper's derivatives may read in place of s."""
PER_ENTRY = frozenset(("s", "i", "j", "g", OUTPUT))
"""Inputs that differ from entry to entry."""
OF_TILES = frozenset(("s", "g", OUTPUT))
"""Inputs with all dimensions of a tile."""
TANH, SIGMOID = 2.0 / math.log(2.0), 1.0 / math.log(2.0)
"""Factors of the argument with which `saturated` gives tanh and sigmoid - 1/2."""


class Form(NamedTuple):
    """What device functions may rely on, beside the text."""

    rows: str = "last"
    """How i counts rows: "last", as kernels do, the last row being the last key's; "first", from 0, for which N - M is
    captured; "packed", from 0 in each sequence, for which cu_q and cu_k are."""
    past: bool = False
    """Whether j <= i in all entries that the mask shows."""
    narrow: bool = False
    """Whether all offsets into captured tensors fit 32 bits."""
    wide: bool = False
    """Whether whole numbers, such as i N + j, may need 64 bits."""


def functions(text: str, form: Form | None = None, saturated: Any = None) -> dict[str, Any]:
    """Return a program's device functions by name: "keep" of a mask, "fn" and "grad" of a score.

    saturated: hopper/parts/scores.py's, for forms of its own on Hopper.
    """
    return compiled(source(text, form or Form(), saturated is not None), saturated)


@lru_cache(1024)
def compiled(text: str, saturated: Any) -> dict[str, Any]:
    """Return the functions of a source. Triton reads it by inspect, and that by linecache: no file is written.

    Triton's cache on disk goes by the source, so another process compiles nothing. Inside a kernel, Triton tells device
    functions apart by their modules' names.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file, module = f"<tilewise program {digest}>", f"tilewise_program_{digest}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    used = {fn.__name__: fn for fn in (tanh, floor_divide, floor_remainder, power, inside, whole)}
    scope = {"__name__": module, "triton": triton, "tl": tl, "saturated": saturated, **used}
    exec(compile(text, file, "exec"), scope)
    return {name: scope[name] for name in ("keep", "fn", "grad") if name in scope}


def arguments(text: str, tensors: Sequence[Tensor], numbers: Sequence[Any], place: tuple[Any, ...] = ()) -> Any:
    """Return what a program's device functions captured: numbers, tensors with strides and sizes, where rows begin.

    place: () for `Form.rows` "last", (N - M,) for "first", (cu_q, cu_k) for "packed".
    """
    program = decode(text)
    found = [numbers[int(name[1:])] for name in _numbers(program)]
    for t in _ranks(program):
        found += [tensors[t], *tensors[t].stride(), *tensors[t].shape]
    return (*found, *place)


def _numbers(program: Program) -> list[str]:
    """Return the inputs that are captured numbers, in order."""
    names = [node[1] for node in program.nodes if node[0] == "in" and node[1][1:].isdigit()]
    return sorted(names, key=lambda name: int(name[1:]))


def _ranks(program: Program) -> dict[int, int]:
    """Return how many dimensions each captured tensor has, in order."""
    found = {program.nodes[n][1]: len(operands(program.nodes[n])) for n in program.loads}
    return {t: found[t] for t in sorted(found)}


@lru_cache(1024)
def source(text: str, form: Form, hopper: bool = False) -> str:
    """Return the source of a program's device functions."""
    program = decode(text)
    if any([node[0] == "lit" and type(node[1]) is int and abs(node[1]) >= 2**31 for node in program.nodes]):
        form = form._replace(wide=True)
    captured = _numbers(program)
    for t, rank in _ranks(program).items():
        captured += [f"t{t}", *[f"t{t}_{what}{axis}" for what in ("stride", "size") for axis in range(rank)]]
    captured += {"last": [], "first": ["shift"], "packed": ["cu_q", "cu_k"]}[form.rows]
    if program.kinds[program.outputs[0]] == "b":
        return _function("keep", ["b", "h", "i", "j", *captured], _mask_lines(program, form))
    derived = (by_output(text) if hopper else None) or derivative(text)
    fn, grad = _score_lines(program, form, hopper, "S"), _score_lines(derived, form, hopper, "dS")
    return "\n\n".join(
        [
            _function("fn", ["S", "unit", "at", *captured], fn),
            _function("grad", ["dS", "S", "T", "unit", "at", *captured], grad),
        ]
    )


def _function(name: str, parameters: list[str], lines: list[str]) -> str:
    """Return a function's source, without statements of which nothing is read."""
    found: list[str] = []
    read: set[str] = set()
    for line in reversed(lines):
        if line.startswith("return ") or line.partition(" = ")[0] in read:
            found.append(f"    {line}\n")
            read.update(re.findall(r"\w+", line))
    return f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{''.join(reversed(found))}"


def _mask_lines(program: Program, form: Form) -> list[str]:
    writer = _Writer(program, form, {"i": "row", "j": "column"})
    lines = [f"row = {_row('i', 'b', form)}", f"column = {_index('j', form)}", *writer.lines]
    (out,) = program.outputs
    found = [writer.names[out]]
    for name, least in (("i", -OPEN), ("j", 0)):
        if name not in program.reads[out]:  # a dimension that is missing
            found.append(f"({name} >= {least})")
    return [*lines, f"return {' & '.join(found)}"]


def _score_lines(program: Program, form: Form, hopper: bool, given: str) -> list[str]:
    """Return the lines of a function of a tile `given`: S or dS."""
    inputs = {"g": "dS", OUTPUT: "T", "b": "at.b", "h": "at.h", "i": "(row0 + row)", "j": "(column0 + column)"}
    writer = _Writer(program, form, inputs, tile=True, hopper=hopper)
    lines = [f"row0 = {_row('at.i0', 'at.b', form)}", f"column0 = {_index('at.j0', form)}"]
    lines += ["row = at.i", "column = at.j", "s = S * unit", *writer.lines]
    out = program.outputs[0]
    found = writer.names[out]
    if not program.reads[out] & OF_TILES:  # in the tile's shape and layout, which costs nothing
        found = f"tl.where({given} == {given}, {found}, {found})"
    return [*lines, f"return {found}"]


def _index(name: str, form: Form) -> str:
    return f"tl.cast({name}, tl.int64)" if form.wide else name


def _row(name: str, b: str, form: Form) -> str:
    """Return a row as the function counts it, in place of a kernel's, which begins at N - M."""
    if form.rows == "packed":
        of_keys, of_queries = [f"(tl.load({cu} + {b} + 1) - tl.load({cu} + {b}))" for cu in ("cu_k", "cu_q")]
        return _index(f"{name} - ({of_keys} - {of_queries})", form)
    return _index(name if form.rows == "last" else f"{name} - shift", form)


def by_output(text: str) -> Program | None:
    """Return the derivative of a score in terms of its output, None if it needs s.

    Of a score such as c tanh(...): on Hopper, S need not stay in registers. The output is rounded, and any number
    where g is 0, even NaN, so that a factor from 0 to 1 has to be held there.
    """
    program, derived = decode(text), derivative(text)
    build = Builder()
    at = build.copy(program)
    y, n = build.wrap(build.add(("in", OUTPUT))), program.outputs[0]
    while program.nodes[n][0] in ("mul", "neg"):
        name, *xs = program.nodes[n]
        factors = [x for x in xs if not program.reads[x] & PER_ENTRY]
        if len(factors) != len(xs) - 1:
            return None
        y = y / build.wrap(at[factors[0]]) if factors else -y
        (n,) = [x for x in xs if x not in factors]
    name, *xs = program.nodes[n]
    if name not in ("tanh", "sigmoid", "exp", "exp2"):
        return None
    both = Builder()  # equal nodes of the two have one number
    at, (out, *_) = both.copy(program), derived.outputs
    out = both.copy(derived)[out]
    rule: Any = OPS[name].derivative
    (factor,) = rule(both.wrap(at[n]), both.wrap(at[xs[0]]))
    moved: list[int] = []
    for m, node in enumerate(both.nodes):
        x = y if m == at[n] else build.wrap(build.add(with_operands(node, [moved[x] for x in operands(node)])))
        moved.append(x.op("max", 0.0).n if m == factor.n and name in ("tanh", "sigmoid") else x.n)
    found = build.done([moved[out]])
    return None if "s" in found.reads[found.outputs[0]] else found


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
        """Return it as an expression."""
        return f"({self.tile} * ({self.factor()}))" if self.times or self.by else self.tile


class _Writer:
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
        self.positive: list[bool] = []
        """Whether whole numbers are known not to be negative."""
        self.products: list[Product | None] = []
        for n, node in enumerate(self.nodes):
            self.sums.append(self.sum_of(n, *node))
            self.products.append(self.product_of(n, *node))
            self.names.append(self.simple(n) or self.assign(f"x{n}", self.expression(n, *node)))
            self.positive.append(self.kinds[n] != "f" and self.is_positive(n, *node))

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
                return self.inputs.get(name, name)
            case "lit", _:
                return _number(literal(self.nodes[n]))
            case "detach", x:
                return self.names[x]
            case "abs", x if self.positive[x]:
                return self.names[x]
            case "where", c, zero, x if self.guards(c, zero, x):
                return self.names[x]
        return None

    def guards(self, c: int, zero: int, x: int) -> bool:
        """Tell whether where(c, zero, x) makes 0 of g / f0 where g is 0: a captured number is not 0, nor infinite."""
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
            return product.written()
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
        if self.positive[x] and self.positive[y]:
            return f"({a} // {b})" if name == "idiv" else f"({a} % {b})"
        return OPS[name].triton.format(a, b)

    def load(self, n: int, t: int, kind: str, *indices: int) -> str:
        """Return a read of a captured tensor. What is the same for all entries comes first in the offset, then what
        differs by tile."""
        terms: tuple[list[str], ...] = [], [], []
        checks = []
        for axis, x in enumerate(indices):
            at, size = self.names[x], f"t{t}_size{axis}"
            split = None
            if self.positive[x]:
                split = self.split(x)
                checks.append(f"({at} < {size})")
            else:
                at = self.assign(f"y{n}_{axis}", f"tl.where({at} < 0, {at} + {size}, {at})")
                checks.append(f"inside({at}, {size})")
            if self.nodes[x] in (("in", "b"), ("in", "h")):
                checks.pop()
            pieces = [(1, split[0]), (2, split[1])] if split else [(0 if self.is_scalar(x) else 2, at)]
            for place, piece in pieces:
                index = piece if self.form.narrow else f"tl.cast({piece}, tl.int64)"
                terms[place].append(f"{index} * t{t}_stride{axis}")
        offset = " + ".join([*terms[0], *terms[1], *terms[2]])
        mask = f", mask={' & '.join(checks)}, other=0" if checks else ""
        found = f"tl.load(t{t} + ({offset}){mask})" if offset else f"tl.load(t{t})"
        return {"f": f"tl.cast({found}, tl.float32)", "i": f"whole({found})", "b": f"({found} != 0)"}[kind]

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
                return first if self.positive[xs[0]] else None
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

    def is_positive(self, n: int, name: str, *xs: Any) -> bool:
        """Tell whether a whole number, or a bool, is known not to be negative."""
        if self.kinds[n] == "b":
            return True
        own = [self.positive[x] for x in xs if type(x) is int and x < n] if name not in ("in", "lit", "load") else []
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
            return f"({split[0]} + {split[1]})"
        if name == "cast" and xs[0] == "f":
            return self.real(xs[1])
        if name in ("tanh", "sigmoid") and "s" in self.reads[n]:
            return self.saturated(n, "1.0") if name == "tanh" else f"(0.5 + {self.saturated(n, '0.5')})"
        if name == "mul" and self.is_scalar(xs[0]) != self.is_scalar(xs[1]):
            by, x = xs if self.is_scalar(xs[0]) else xs[::-1]
            factor, node = self.names[by], self.nodes[x]
            if node[0] == "tanh" and "s" in self.reads[x]:
                return self.saturated(x, factor)
            if node[:2] == ("cast", "f") and (split := self.split(node[2])):
                return "({0} * tl.cast({1}, tl.float32) + {0} * tl.cast({2}, tl.float32))".format(factor, *split)
        return None

    def saturated(self, n: int, limit: str) -> str:
        """Return `limit` times tanh, or limit 2 (sigmoid - 1/2)."""
        name, x = self.nodes[n]
        product = self.products[x] or Product(self.names[x])
        product = product._replace(times=(str(TANH if name == "tanh" else SIGMOID), *product.times))
        return f"saturated({product.written()}, {limit})"

    def real(self, x: int) -> str | None:
        """Return a whole number as a floating one, exact below 2^24, in parts that are each converted once."""
        if split := self.split(x):
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


@triton.jit
def floor_divide(a, b):
    """Return a / b, rounded down."""
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r ^ b) < 0), q - 1, q)


@triton.jit
def floor_remainder(a, b):
    """Return what a / b, rounded down, leaves."""
    r = a % b
    return tl.where((r != 0) & ((r ^ b) < 0), r + b, r)


@triton.jit
def power(x, y):
    """Return x^y, also where x is negative and y whole."""
    x, y = tl.cast(x, tl.float32), tl.cast(y, tl.float32)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    half = y * 0.5
    signed = tl.where(tl.floor(half) == half, size, tl.where(tl.floor(y) == y, -size, float("nan")))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0.0, signed, size))


@triton.jit
def inside(at, size):
    """Return 0 <= at < size."""
    if at.dtype.primitive_bitwidth == 64:
        return (at >= 0) & (at < size)
    else:
        return tl.cast(at, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def whole(x):
    """Return a number of at least 32 bits."""
    if x.dtype.primitive_bitwidth == 64:
        return x
    else:
        return x.to(tl.int32)
