"""What a row of a mask sees, as intervals of keys: comparisons solved for j.

A mask of class A is one interval a row, whose ends never decrease from row to row. Kernels find its tiles in registers:
`keys` are the ends, and `queries` the rows that see a key. Of class B, bounds.py says which tiles may be visible; of C,
nothing but its entries does.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from .arithmetic import Affine, affine
from .bounds import bounds
from .program import Builder, Node, Program, decode, literal, operands, with_operands

OPEN = 1 << 30
"""The end of an interval without one, as in kernels."""
MOST_INTERVALS = 8
MOST_NODES = 400
"""The most nodes that are made for ends: solving nested minima and maxima may double them at every level."""
Ends = tuple[Any, Any]
"""Nodes of the first key and of the one after the last; None where there is no end."""
EVERYTHING: list[Ends] = [(None, None)]
J = ("in", "j")
REVERSED = {"gt": "lt", "ge": "le"}


class Shape(NamedTuple):
    """A mask's class, A, B or C, and programs of whole numbers; None where the mask has none.

    ends: for each interval its first key, and the one after its last. In any order; some may be empty or overlap.
    keys: of class A, the same of row i: two outputs.
    queries: of class A, the first row that sees key j, and the one after the last.
    """

    name: str
    ends: Program | None = None
    keys: Program | None = None
    queries: Program | None = None


class NoUnionError(Exception):
    """The rows of the mask are no intervals that follow from its text, or too many."""


@lru_cache(4096)
def shape(text: str) -> Shape:
    """Return the shape of the mask with this text."""
    program = decode(text)
    union, nodes = Union(program), bounds(text)
    open_everywhere = [literal(nodes.nodes[n]) for n in nodes.outputs] == [False, True]
    try:
        found = union.of(program.outputs[0]) or [(union.wrap(union.literal(OPEN)), None)]
    except (NoUnionError, RecursionError):  # no mask of so many nested conditions has few intervals
        return Shape("C" if open_everywhere else "B")
    ends = union.done([union.or_open(end, sign) for pair in found for end, sign in zip(pair, (-1, 1), strict=True)])
    if len(found) != 1 or "h" in frozenset().union(*ends.reads):
        return Shape("B", ends)
    lo, hi = found[0]
    j = union.wrap(union.add(("in", "j")))
    try:
        first, after = [None if end is None else union.rows.first_above(end, j) for end in (hi, lo)]
    except (NoUnionError, RecursionError):
        return Shape("B", ends)
    return Shape("A", ends, ends, union.done([union.or_open(first, -1), union.or_open(after, 1)]))


class Union(Builder):
    """Finds the union of intervals that every bool node is. The nodes made here do not read j."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.free = ["j" not in names for names in program.reads]
        self.copies: dict[int, int] = {}
        for n, node in enumerate(program.nodes):
            if self.free[n]:
                self.copies[n] = self.add(with_operands(node, [self.copies[x] for x in operands(node)]))
        self.most = len(self.nodes) + MOST_NODES
        self.rows = Rows(self)
        self.unions: dict[int, list[Ends]] = {}
        self.solved: dict[tuple[int, int, bool], list[Ends]] = {}

    def or_open(self, end: Any, sign: int) -> int:
        """Return the node of an end, which may be open."""
        return self.lift(sign * OPEN if end is None else end)

    def check_size(self) -> None:
        """Give up where too many nodes are made."""
        if len(self.nodes) > self.most:
            raise NoUnionError

    def whole(self, n: int) -> Any:
        """Return the program's node n, a whole number that does not read j, as one of these."""
        if self.program.kinds[n] != "i":
            raise NoUnionError
        return self.wrap(self.copies[n])

    def plus(self, x: Any, c: int) -> Any:
        """Return x + c; x may be a sum with a number."""
        node = self.nodes[x.n]
        if node[0] in ("add", "sub"):
            a, b = [literal(self.nodes[y]) for y in node[1:]]
            if b is not None:
                return self.wrap(node[1]) + ((b if node[0] == "add" else -b) + c)
            if a is not None:
                return (a + c) + (self.wrap(node[2]) if node[0] == "add" else -self.wrap(node[2]))
        return x + c

    def tidy(self, x: Any) -> Any:
        """Return x as a i + c, if it is that."""
        forms: list[Affine | None] = []
        for node in self.nodes[: x.n + 1]:
            forms.append(affine(node, forms))
        form = forms[x.n]
        if form is None or form[0] == 0:
            return x
        return self.plus(self.wrap(self.add(("in", "i"))) * form[0], form[2])

    # Unions

    def both(self, x: list[Ends], y: list[Ends]) -> list[Ends]:
        """Return the intervals that are in both unions."""
        return self.fewer([(self.inner(a, c, "max"), self.inner(b, d, "min")) for a, b in x for c, d in y])

    def inner(self, x: Any, y: Any, pick: str) -> Any:
        """Return the end of two that is further inside."""
        return y if x is None else x if y is None else x.op(pick, y)

    def either(self, x: list[Ends], y: list[Ends]) -> list[Ends]:
        """Return the intervals of both unions."""
        return self.fewer(x + y)

    def fewer(self, x: list[Ends]) -> list[Ends]:
        """Return the union, where intervals with one open end alike are one."""
        found: list[Ends] = []
        for a, b in x:
            for n, (c, d) in enumerate(found):
                if a is None and c is None:
                    found[n] = (None, None if b is None or d is None else b.op("max", d))
                    break
                if b is None and d is None:
                    found[n] = (None if a is None or c is None else a.op("min", c), None)
                    break
                if (number_of(a), number_of(b)) == (number_of(c), number_of(d)):
                    break
            else:
                found.append((a, b))
        if any([a is None and b is None for a, b in found]):
            return EVERYTHING
        if len(found) > MOST_INTERVALS:
            raise NoUnionError
        return found

    def inverse(self, x: list[Ends]) -> list[Ends]:
        """Return what is in none of the intervals."""
        found = EVERYTHING
        for a, b in x:
            outside: list[Ends] = ([] if a is None else [(None, a)]) + ([] if b is None else [(b, None)])
            found = self.both(found, outside)
        return found

    def all_if(self, c: Any) -> list[Ends]:
        """Return all keys where a node that does not read j is true, and none elsewhere."""
        number = self.number(c)
        return [(None, c.op("where", OPEN, -OPEN))] if number is None else EVERYTHING if number else []

    def all_if_negative(self, x: Any) -> list[Ends]:
        """Return all keys where a whole number is below 0. Where it grows with i, a first key says so, that grows."""
        if self.rows.trend(x.n) == 1:
            return [((x < 0).op("where", -OPEN, OPEN), None)]
        return self.all_if(x < 0)

    # Conditions

    def of(self, n: int) -> list[Ends]:
        """Return the union that a bool node is."""
        if n not in self.unions:
            self.unions[n] = self.condition(n)
        return self.unions[n]

    def condition(self, n: int) -> list[Ends]:
        """Return the same for the first time."""
        node, kinds = self.program.nodes[n], self.program.kinds
        name = REVERSED.get(node[0], node[0])
        if self.free[n] and (name not in ("lt", "le", "and") or kinds[node[1]] == "f"):
            return self.all_if(self.wrap(self.copies[n]))
        match name:
            case "lt" | "le":
                x, y = node[1:] if name == node[0] else node[:0:-1]
                return self.at_most(x, y, strict=name == "lt")
            case "eq" | "ne" if kinds[node[1]] == "i":
                same = self.both(self.at_most(node[1], node[2]), self.at_most(node[2], node[1]))
                return same if name == "eq" else self.inverse(same)
            case "and":
                return self.both(self.of(node[1]), self.of(node[2]))
            case "or":
                return self.either(self.of(node[1]), self.of(node[2]))
            case "not":
                return self.inverse(self.of(node[1]))
            case "where":
                return self.chosen(*[self.of(x) for x in node[1:]])
            case "eq" | "ne" | "xor" if kinds[node[1]] == "b":
                x, y = self.of(node[1]), self.of(node[2])
                equal = self.chosen(x, y, self.inverse(y))
                return equal if name == "eq" else self.inverse(equal)
        raise NoUnionError

    def chosen(self, c: list[Ends], x: list[Ends], y: list[Ends]) -> list[Ends]:
        """Return x where c is true, y elsewhere."""
        return self.either(self.both(c, x), self.both(self.inverse(c), y))

    def at_most(self, x: int, y: int, strict: bool = False) -> list[Ends]:
        """Return where x <= y, or x < y."""
        one = int(strict)
        if self.free[y]:
            return self.solve(x, self.plus(self.whole(y), -one), up=False)
        if self.free[x]:
            return self.solve(y, self.plus(self.whole(x), one), up=True)
        (k, e), (m, f) = self.linear(x), self.linear(y)
        return self.solve_linear(k - m, e - f, self.wrap(self.literal(-one)), up=False)

    def linear(self, n: int) -> tuple[int, Any]:
        """Return k and e of a node that is k j + e."""
        node = self.program.nodes[n]
        if self.free[n]:
            return 0, self.whole(n)
        if node == J:
            return 1, self.wrap(self.literal(0))
        forms = [self.linear(x) for x in node[1:]] if node[0] in ("neg", "add", "sub", "mul") else []
        match node[0], forms:
            case "neg", [(k, e)]:
                return -k, -e
            case "add", [(k, e), (m, f)]:
                return k + m, e + f
            case "sub", [(k, e), (m, f)]:
                return k - m, e - f
            case "mul", [(0, e), (k, f)] | [(k, f), (0, e)] if self.number(e) is not None:
                return k * self.number(e), e * f
        raise NoUnionError

    def solve(self, n: int, e: Any, up: bool) -> list[Ends]:
        """Return where node n is at most e, or at least e if `up`; e does not read j."""
        key = n, e.n, up
        if key not in self.solved:
            self.solved[key] = self.solution(n, e, up)
        return self.solved[key]

    def solution(self, n: int, e: Any, up: bool) -> list[Ends]:
        """Return the same for the first time."""
        self.check_size()
        node = self.program.nodes[n]
        if self.free[n]:
            x = self.whole(n)
            return self.all_if_negative(self.plus(e - x if up else x - e, -1))
        match node:
            case "neg", x:
                return self.solve(x, -e, not up)
            case "abs", x:
                some = self.solve(x, e, up), self.solve(x, -e, not up)
                return self.either(*some) if up else self.both(*some)
            case "min" | "max", x, y:
                some = self.solve(x, e, up), self.solve(y, e, up)
                return self.both(*some) if (node[0] == "min") == up else self.either(*some)
            case "where", c, x, y:
                return self.chosen(self.of(c), self.solve(x, e, up), self.solve(y, e, up))
            case "add", x, y if self.free[x] or self.free[y]:
                x, y = (y, x) if self.free[x] else (x, y)
                return self.solve(x, e - self.whole(y), up)
            case "sub", x, y if self.free[y]:
                return self.solve(x, e + self.whole(y), up)
            case "sub", x, y if self.free[x]:
                return self.solve(y, self.whole(x) - e, not up)
            case "idiv", x, y if (literal(self.program.nodes[y]) or 0) > 0:
                c = literal(self.program.nodes[y])  # x // c <= e: x < c (e + 1)
                return self.solve(x, e * c if up else self.plus(self.plus(e, 1) * c, -1), up)
        return self.solve_linear(*self.linear(n), e, up)

    def solve_linear(self, k: int, f: Any, e: Any, up: bool) -> list[Ends]:
        """Return where k j + f is at most e, or at least e if `up`."""
        if k == 0:
            return self.all_if_negative(self.plus(e - f if up else f - e, -1))
        e = self.tidy(e - f if k > 0 else f - e)
        up, k = up == (k > 0), abs(k)
        if up:
            return [(e if k == 1 else -(-e // k), None)]
        return [(None, self.plus(e if k == 1 else e // k, 1))]


def number_of(end: Any) -> int | None:
    """Return the number of an end's node, by which ends are compared."""
    return None if end is None else end.n


class Rows:
    """Follows ends from row to row."""

    def __init__(self, build: "Union") -> None:
        self.build = build
        self.trends: list[int | None] = []
        self.first: dict[tuple[int, int, bool], Any] = {}

    def trend(self, n: int) -> int | None:
        """Return 1 of a node that never decreases as i grows, -1 of one that never increases, 0 without i, or None."""
        for m in range(len(self.trends), n + 1):
            self.trends.append(self.trend_of(self.build.nodes[m]))
        return self.trends[n]

    def trend_of(self, node: Node) -> int | None:
        """Return the same of the next node."""
        if node == ("in", "i"):
            return 1
        some = [self.trends[x] for x in operands(node)]
        if not any(some):
            return None if None in some else 0
        numbers = [literal(self.build.nodes[x]) for x in operands(node)]
        match node[0], some:
            case "add" | "min" | "max", [x, y]:
                return together(x, y)
            case "sub", [x, y]:
                return together(x, opposite(y))
            case "neg", [x]:
                return opposite(x)
            case "mul", [x, y] if numbers != [None, None]:
                k, x = (numbers[0], y) if numbers[0] is not None else (numbers[1], x)
                return None if not k else x if k > 0 else opposite(x)
            case "idiv", [x, 0] if (numbers[1] or 0) > 0:
                return x
            case (("lt" | "le"), [x, 0]):
                return opposite(x)
            case "where", [c, 0, 0] if None not in numbers[1:]:
                return c if numbers[1] > numbers[2] else opposite(c)
        return None

    def first_above(self, end: Any, t: Any, above: bool = True) -> Any:
        """Return the first row at which an end that never decreases is above t, or one that never increases below it.

        Raises NoUnionError if the end is neither.
        """
        key = end.n, t.n, above
        if key not in self.first:
            self.build.check_size()
            self.first[key] = self.first_of(end, t, above)
        return self.first[key]

    def first_of(self, end: Any, t: Any, above: bool) -> Any:
        """Return the same for the first time."""
        build, n = self.build, end.n
        node, trend = build.nodes[n], self.trend(n)
        if trend == 0:
            return (end > t if above else end < t).op("where", -OPEN, OPEN)
        if trend != (1 if above else -1):
            raise NoUnionError
        some = [build.wrap(x) for x in operands(node)]
        trends, numbers = [self.trend(x.n) for x in some], [build.number(x) for x in some]
        match node[0], some, trends:
            case "in", _, _:
                return build.plus(t, 1)
            case "min" | "max", [x, y], _:
                pick = "max" if (node[0] == "min") == above else "min"
                return self.first_above(x, t, above).op(pick, self.first_above(y, t, above))
            case "add", [x, y], [_, 0] | [0, _]:
                x, y = (x, y) if trends[1] == 0 else (y, x)
                return self.first_above(x, t - y, above)
            case "sub", [x, y], [_, 0]:
                return self.first_above(x, t + y, above)
            case "sub", [x, y], [0, _]:
                return self.first_above(y, x - t, not above)
            case "neg", [x], _:
                return self.first_above(x, -t, not above)
            case "mul", [x, y], _:
                x, k = (y, numbers[0]) if numbers[0] is not None else (x, numbers[1])
                t, above = (t, above) if k > 0 else (-t, not above)
                return self.first_above(x, t // abs(k) if above else -(-t // abs(k)), above)
            case "idiv", [x, c], _:  # x // c > t: x > c (t + 1) - 1
                return self.first_above(x, (t + 1) * c - 1 if above else t * c, above)
            case "where", [c, _, _], _:
                return self.first_change(c)
        raise NoUnionError

    def first_change(self, c: Any) -> Any:
        """Return the first row at which x < 0 is no longer true, or becomes true."""
        name, n, zero = self.build.nodes[c.n]
        if name != "lt" or literal(self.build.nodes[zero]) != 0:
            raise NoUnionError
        x, grows = self.build.wrap(n), self.trend(n) == 1
        return self.first_above(x, self.build.wrap(self.build.literal(-1 if grows else 0)), above=grows)


def opposite(trend: int | None) -> int | None:
    """Return the trend of -x."""
    return None if trend is None else -trend


def together(x: int | None, y: int | None) -> int | None:
    """Return the trend of a sum."""
    return None if x is None or y is None or x * y < 0 else x or y
