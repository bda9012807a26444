"""Interval arithmetic on programs: between which values every node lies, for the rows and keys of a tile.

The ends of intervals are nodes of a new program, which reads the tile's first and last row and key. Of a bool, the ends
are `certain`, true if it is true at every entry, and `possible`, false if it is false at every entry.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .program import Builder, Node, Program, literal, operands, with_operands

FAR = 1 << 40
"""Whole numbers are between -FAR and FAR, where nothing is known of them."""
RANGES: dict[str, tuple[float | None, float | None]] = {
    "exp": (0.0, None), "exp2": (0.0, None), "log": (None, None), "log2": (None, None), "sqrt": (0.0, None),
    "tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0), "erf": (-1.0, 1.0),
}  # fmt: skip
"""Operations that never decrease, and what their results are between for any number."""


class Interval(NamedTuple):
    """The least and the greatest value of a node: nodes, or None for no bound. For bools: certain, possible."""

    lo: Any
    hi: Any

    @property
    def point(self) -> bool:
        """Tell whether both are the same node."""
        return self.lo is not None and self.hi is not None and self.lo.n == self.hi.n

    @property
    def open(self) -> bool:
        """Tell whether a bound is missing."""
        return self.lo is None or self.hi is None


def each(f: Callable[..., Any], *xs: Interval) -> Interval:
    """Return f of the lower ends and f of the upper ends, without a bound where one of them is missing."""
    return Interval(*[None if any([end is None for end in ends]) else f(*ends) for ends in zip(*xs, strict=True)])


def point(x: Any) -> Interval:
    """Return the interval of one node alone."""
    return Interval(x, x)


NOTHING = point(None)
Affine = tuple[int, int, int]


def affine(node: Node, forms: Sequence[Affine | None]) -> Affine | None:
    """Return (a, b, c) of a node that is a i + b j + c, from those of earlier nodes."""
    name = node[0]
    if name == "in":
        return {"i": (1, 0, 0), "j": (0, 1, 0)}.get(node[1])
    if name == "lit":
        return (0, 0, node[1]) if type(node[1]) is int else None
    own = [forms[x] for x in operands(node)] if name in ("add", "sub", "neg", "mul") else [None]
    x, y = own[0], own[-1]
    if x is None or y is None:
        return None
    if name == "mul":
        x, y = (x, y) if x[:2] == (0, 0) else (y, x)
        return (x[2] * y[0], x[2] * y[1], x[2] * y[2]) if x[:2] == (0, 0) else None
    if name == "neg":
        return -x[0], -x[1], -x[2]
    sign = 1 if name == "add" else -1
    return x[0] + sign * y[0], x[1] + sign * y[1], x[2] + sign * y[2]


class Bounds:
    """Intervals of all nodes of a program.

    inputs: intervals of b, h, i and j; of other inputs nothing is known.
    static: bounds must be numbers: nothing is known of captured tensors and numbers, and floating ones are no NaN.
    later: j stands for i + 1 + j, a key behind the row's own, and floating numbers may be NaN.
    """

    def __init__(
        self,
        program: Program,
        build: Builder,
        inputs: Mapping[str, tuple[Any, Any]],
        static: bool = False,
        later: bool = False,
    ) -> None:
        self.program, self.build, self.static, self.later = program, build, static, later
        self.inputs = {name: Interval(*map(self.end, ends)) for name, ends in inputs.items()}
        self.affine: list[Affine | None] = []
        self.found: list[Interval] = []
        for node, kind in zip(program.nodes, program.kinds, strict=True):
            self.affine.append(affine(node, self.affine))
            self.found.append(self.of(node, kind))

    def end(self, x: Any) -> Any:
        """Return a number or a node as a node; None stays."""
        return None if x is None else self.build.wrap(self.build.lift(x))

    def unknown(self, kind: str) -> Interval:
        """Return the interval of a node of which nothing is known."""
        return Interval(self.end(False), self.end(True)) if kind == "b" else NOTHING

    def split(self, form: Affine) -> tuple[Interval, Interval]:
        """Return the intervals of a i + c and of b j."""
        a, b, c = form
        if self.later:
            a, c = a + b, b + c
        rows, keys = self.scaled(self.inputs["i"], a), self.scaled(self.inputs["j"], b)
        return self.plus(rows, point(self.end(c))), keys

    def of(self, node: Node, kind: str) -> Interval:
        """Return the interval of the next node."""
        name, xs = node[0], [self.found[x] for x in operands(node)]
        form = self.affine[-1]
        if form and form[:2] != (0, 0):
            return self.plus(*self.split(form))
        if name == "lit":
            return point(self.end(literal(node)))
        if name == "in":
            known = NOTHING if self.static or node[1] in "sg" else point(self.add(node))
            return self.inputs.get(node[1], known)
        if name == "load":
            return self.load(node, xs, kind)
        if all([x.point for x in xs]):
            return point(self.add(with_operands(node, [x.lo.n for x in xs])))
        floating = [self.program.kinds[x] == "f" for x in operands(node)]
        if (self.later or not self.static) and any([x.open and f for x, f in zip(xs, floating, strict=True)]):
            return self.unknown(kind)  # it may be NaN, of which no comparison says anything
        if name == "cast":
            return self.cast(node, xs[0])
        if name in COMPARISONS:
            return self.compared(node, xs)
        if name == "mul" and node[1] == node[2]:
            name, xs = "square", xs[:1]
        rule = RULES.get(f"{name} {kind}") or RULES.get(name)
        if rule is not None:
            return self.rounded(name, kind, rule(self, *xs))
        if name in RANGES:
            return self.rounded(name, kind, self.rising(name, xs[0]))
        return self.unknown(kind)

    def add(self, node: Node) -> Any:
        """Return a node of the new program."""
        return self.build.wrap(self.build.add(node))

    def load(self, node: Node, xs: list[Interval], kind: str) -> Interval:
        """Return the bounds of what is read: the new program has three tensors for each one, see `tiles`."""
        if self.static or any([x.open for x in xs]):
            return self.unknown(kind)
        if all([x.point for x in xs]):
            return point(self.add(("load", 3 * node[1], kind, *[x.lo.n for x in xs])))
        ends = [end.n for x in xs for end in x]
        return Interval(*[self.add(("load", 3 * node[1] + which, kind, *ends)) for which in (1, 2)])

    def cast(self, node: Node, x: Interval) -> Interval:
        """Return the interval as another kind; a whole number of NaN is any."""
        to, of = node[1], self.program.kinds[node[2]]
        if to == "b":
            return self.negated(self.equal(x, point(self.end(0).cast(of)), of))
        ends = each(lambda end: end.cast(to), x)
        if (of, to) == ("f", "i") and not self.static:
            return each(lambda end, y, far: end.op("eq", end).op("where", y, far), x, ends, Interval(-FAR, FAR))
        return ends

    def rounded(self, name: str, kind: str, x: Interval) -> Interval:
        """Return a little more of floating numbers, whose operations devices round in their own ways."""
        if kind != "f" or name in EXACT or x.open or self.static:
            return x
        none = (x.lo - x.hi) * 0.0  # NaN where an end is infinite: then NaN may lie between
        slack = abs(x.lo).op("max", abs(x.hi)) * 2.0**-20 + 1e-30 + none
        return Interval(x.lo - slack, x.hi + slack)

    def rising(self, name: str, x: Interval) -> Interval:
        """Return bounds of an operation that never decreases."""
        ends = zip(x, RANGES[name], strict=True)
        return Interval(*[self.end(default) if end is None else end.op(name) for end, default in ends])

    def wave(self, x: Interval) -> Interval:
        """Return bounds of a sine or cosine; of an infinite number, it is NaN."""
        none = 0.0 if self.static else (x.lo - x.hi) * 0.0
        return Interval(self.end(none + -1.0), self.end(none + 1.0))

    def falling(self, x: Interval) -> Interval:
        """Return bounds of 1 / sqrt(x)."""
        return Interval(self.end(0.0) if x.hi is None else x.hi.op("rsqrt"), None if x.lo is None else x.lo.op("rsqrt"))

    def plus(self, x: Interval, y: Interval) -> Interval:
        """Return x + y."""
        return each(operator.add, x, y)

    def negative(self, x: Interval) -> Interval:
        """Return -x."""
        return each(operator.neg, Interval(x.hi, x.lo))

    def scaled(self, x: Interval, k: Any) -> Interval:
        """Return x times a number."""
        if k == 0 and isinstance(k, int):
            return point(self.end(k))
        return each(lambda end: end * k, x if k > 0 else Interval(x.hi, x.lo))

    def span(self, ends: Sequence[Any]) -> Interval:
        """Return the interval that holds all ends."""
        lo, hi = self.end(ends[0]), self.end(ends[0])
        for end in ends[1:]:
            lo, hi = lo.op("min", end), hi.op("max", end)
        return Interval(lo, hi)

    def number(self, x: Interval) -> Any:
        """Return the number that a node always is, or None."""
        return self.build.number(x.lo) if x.point else None

    def times(self, x: Interval, y: Interval) -> Interval:
        """Return x * y."""
        for one, other in ((x, y), (y, x)):
            if self.number(one) is not None:
                return self.scaled(other, self.number(one))
        return NOTHING if x.open or y.open else self.span([a * b for a in x for b in y])

    def size(self, x: Interval) -> Interval:
        """Return |x|."""
        return self.largest(self.largest(x, self.negative(x)), point(self.end(0)))

    def square(self, x: Interval) -> Interval:
        """Return x * x."""
        lo, hi = self.size(x)
        return Interval(lo * lo, None if hi is None else hi * hi)

    def largest(self, x: Interval, y: Interval) -> Interval:
        """Return max(x, y)."""
        lo = [end for end in (x.lo, y.lo) if end is not None]
        hi = None if x.hi is None or y.hi is None else x.hi.op("max", y.hi)
        return Interval(lo[0].op("max", *lo[1:]) if len(lo) == 2 else lo[0] if lo else None, hi)

    def least(self, x: Interval, y: Interval) -> Interval:
        """Return min(x, y)."""
        hi = [end for end in (x.hi, y.hi) if end is not None]
        lo = None if x.lo is None or y.lo is None else x.lo.op("min", y.lo)
        return Interval(lo, hi[0].op("min", *hi[1:]) if len(hi) == 2 else hi[0] if hi else None)

    def divided(self, x: Interval, y: Interval, whole: bool) -> Interval:
        """Return x / y or x // y by a divisor that is one number in the tile."""
        n = self.number(y)
        if not y.point or n == 0 or (n is None and x.open):
            return NOTHING
        ends = each(lambda end: end // y.lo if whole else end / y.lo, x if n is None or n > 0 else Interval(x.hi, x.lo))
        return self.span(ends) if n is None else ends

    def remainder(self, x: Interval, y: Interval) -> Interval:
        """Return x % y by a divisor that is one number in the tile."""
        if not y.point or self.number(y) == 0:
            return NOTHING
        n = y.lo
        every = Interval((n + 1).op("min", 0), (n - 1).op("max", 0))
        if x.open:
            return every
        inner = self.span([x.lo % n, x.hi % n])
        same = (x.lo // n) == (x.hi // n)
        return each(lambda a, b: same.op("where", a, b), inner, every)

    def bits(self, x: Interval, y: Interval) -> Interval:
        """Return x & y of whole numbers: by 2^k - 1 it is a remainder."""
        for one, other in ((x, y), (y, x)):
            n = self.number(one)
            if n is not None and n >= 0:
                all_ones = n & (n + 1) == 0
                return self.remainder(other, point(self.end(n + 1))) if all_ones else Interval(self.end(0), one.lo)
        return NOTHING

    def shifted(self, x: Interval, y: Interval, name: str) -> Interval:
        """Return x << y or x >> y by one number."""
        return each(lambda end: end.op(name, y.lo), x) if y.point else NOTHING

    def at_most(self, x: Interval, y: Interval, kind: str, strict: bool = False) -> Interval:
        """Return x <= y, or x < y; of NaN, no comparison is certain."""
        below, above = ("lt", "ge") if strict else ("le", "gt")
        certain = False if x.hi is None or y.lo is None else x.hi.op(below, y.lo)
        if x.lo is None or y.hi is None:
            possible: Any = True
        else:
            possible = ~x.lo.op(above, y.hi) if kind == "f" else x.lo.op(below, y.hi)
        return Interval(self.end(certain), self.end(possible))

    def equal(self, x: Interval, y: Interval, kind: str) -> Interval:
        """Return x == y: both x <= y and y <= x."""
        return self.both(self.at_most(x, y, kind), self.at_most(y, x, kind))

    def compared(self, node: Node, xs: list[Interval]) -> Interval:
        """Return a comparison. Of a i + b j + c on either side, rows go to one side and keys to the other."""
        name, x, y = node[0], node[1], node[2]
        kind, one, other = self.program.kinds[x], xs[0], xs[1]
        p, q = self.affine[x], self.affine[y]
        if p is not None and q is not None:
            form = (p[0] - q[0], p[1] - q[1], p[2] - q[2])
            left = form[0] > 0 or (form[0] == 0 and form[1] < 0)  # where rows need no change of sign
            one, keys = self.split(form if left else (-form[0], -form[1], -form[2]))
            other = self.negative(keys)
            one, other = (one, other) if left else (other, one)
        if kind == "b":
            one, other, kind = *[each(lambda end: end.cast("i"), x) for x in xs], "i"
        if name in ("gt", "ge"):
            one, other = other, one
        if name in ("eq", "ne"):
            same = self.equal(one, other, kind)
            return same if name == "eq" else self.negated(same)
        return self.at_most(one, other, kind, strict=name in ("lt", "gt"))

    def negated(self, x: Interval) -> Interval:
        """Return ~x."""
        return Interval(~x.hi, ~x.lo)

    def both(self, x: Interval, y: Interval) -> Interval:
        """Return x & y of bools."""
        return Interval(x.lo & y.lo, x.hi & y.hi)

    def either(self, x: Interval, y: Interval) -> Interval:
        """Return x | y of bools."""
        return Interval(x.lo | y.lo, x.hi | y.hi)

    def chosen(self, c: Interval, x: Interval, y: Interval) -> Interval:
        """Return where(c, x, y)."""
        if self.number(c) is not None:
            return x if self.number(c) else y
        if c.point:
            return each(lambda a, b: c.lo.op("where", a, b), x, y)
        either = Interval(self.least(x, y).lo, self.largest(x, y).hi)
        return each(lambda a, b, any_of: c.lo.op("where", a, c.hi.op("where", any_of, b)), x, y, either)

    def differ(self, x: Interval, y: Interval) -> Interval:
        """Return x ^ y of bools."""
        no_x, no_y = self.negated(x), self.negated(y)
        return self.either(self.both(x, no_y), self.both(no_x, y))


Rule = Callable[..., Interval]
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
EXACT = ("neg", "abs", "min", "max", "where", "floor", "ceil", "detach")
"""Operations on floating numbers that round nothing."""
RULES: dict[str, Rule] = {
    "add": Bounds.plus,
    "sub": lambda at, x, y: at.plus(x, at.negative(y)),
    "neg": Bounds.negative,
    "abs": Bounds.size,
    "mul": Bounds.times,
    "square": Bounds.square,
    "min": Bounds.least,
    "max": Bounds.largest,
    "div": lambda at, x, y: at.divided(x, y, whole=False),
    "idiv": lambda at, x, y: at.divided(x, y, whole=True),
    "mod i": Bounds.remainder,
    "sin": Bounds.wave,
    "cos": Bounds.wave,
    "rsqrt": Bounds.falling,
    "floor": lambda at, x: each(lambda end: end.op("floor"), x),
    "ceil": lambda at, x: each(lambda end: end.op("ceil"), x),
    "detach": lambda at, x: x,
    "and i": Bounds.bits,
    "shl": lambda at, x, y: at.shifted(x, y, "shl"),
    "shr": lambda at, x, y: at.shifted(x, y, "shr"),
    "not": Bounds.negated,
    "and b": Bounds.both,
    "or b": Bounds.either,
    "xor b": Bounds.differ,
    "where": Bounds.chosen,
}
"""By operation, or operation and kind. Of others nothing is known."""
