"""The derivative of a program: reverse mode over its nodes, which gives a program again."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .ops import OPS
from .program import Builder, Node, Program, decode, literal, operands

BOUNDED = {"tanh", "sigmoid", "sin", "cos", "erf"}
"""Operations whose result is finite."""
KEEP_FINITE = {"cast", "add", "sub", "mul", "neg", "abs", "min", "max", "where", "floor", "ceil", "detach"}
"""Operations of finite numbers whose result is finite, but for overflow."""


def gathers(program: Program, learned: Sequence[int]) -> list[int]:
    """Return the nodes that read numbers from the captured tensors `learned`, of those that are floating."""
    return [n for n in program.loads if program.nodes[n][1] in learned and program.kinds[n] == "f"]


@lru_cache(1024)
def derivative(text: str, learned: tuple[int, ...] = (), indices: bool = False, by: str = "s") -> Program:
    """Return the program of ds and of one number for each of `gathers`: their gradients, from g, the first output's.

    What a gather's number is added to is the entry that the gather read; gathers from one tensor add up.
    indices: whether the indices of all gathers follow as outputs, in order.
    by: the input in place of s. A program that reads g, a derivative itself, has gg for the gradient of its output.
    A gradient of 0 stays 0, even where a factor of it is infinite or NaN, as in a branch of torch.where not taken.
    As all is pointwise, ds for the tangent of s in place of g is the tangent of the output.
    """
    program, build = decode(text), Builder()
    at = build.copy(program)
    loads = gathers(program, learned)
    inputs = {node[1]: n for n, node in enumerate(program.nodes) if node[0] == "in"}
    wanted = _depend_on(program, {*loads, inputs.get(by, -1)})
    seed = next(name for name in ("g", "gg", "ggg") if name not in inputs)
    gradients = {program.outputs[0]: build.wrap(build.add(("in", seed)))}
    factors = _Factors(build, trust_loads="where" not in [node[0] for node in program.nodes])
    for n, node in reversed([*enumerate(program.nodes)]):
        if n in gradients and n in wanted:
            for x, part in factors.parts(node, gradients[n], at, n):
                if x in wanted and part is not None:
                    gradients[x] = gradients[x] + part if x in gradients else part
    zero = build.literal(0.0)
    outputs = [gradients[n].n if n in gradients else zero for n in (inputs.get(by, -1), *loads)]
    if indices:
        outputs += [at[x] for n in loads for x in operands(program.nodes[n])]
    return build.done(outputs)


def _depend_on(program: Program, sources: set[int]) -> set[int]:
    """Return the floating nodes that depend on these by floating nodes."""
    found = set(sources)
    for n, node in enumerate(program.nodes):
        if program.kinds[n] == "f" and node[0] != "load" and not found.isdisjoint(operands(node)):
            found.add(n)
    return found


class _Factors:
    """Multiplies gradients by derivatives of operations."""

    def __init__(self, build: Builder, trust_loads: bool) -> None:
        self.build, self.trust_loads = build, trust_loads
        self.of_entries: list[bool] = []
        self.finite: list[bool] = []

    def parts(self, node: Node, g: Any, at: Sequence[int], n: int) -> list[tuple[int, Any]]:
        """Return the operands of node n, each with what it gets of n's gradient g; `at` says where nodes are here."""
        if node[0] == "cast":
            return [(node[2], g)]
        rule = OPS[node[0]].derivative if node[0] in OPS else None
        if rule is None:
            return []
        xs = operands(node)
        factors = rule(*[self.build.wrap(at[x]) for x in (n, *xs)])
        return [(x, self.times(g, factor)) for x, factor in zip(xs, factors, strict=True)]

    def times(self, g: Any, factor: Any) -> Any:
        """Return g times a factor: a number, a bool that selects, or a node; 0 where g is 0."""
        if factor is None or isinstance(factor, float):
            return factor and g * factor
        if factor.kind == "b":
            return factor.op("where", g, 0.0)
        node = self.build.nodes[factor.n]
        if node[0] == "div" and literal(self.build.nodes[node[1]]) == 1.0:
            product = g / self.build.wrap(node[2])
        else:
            product = g * factor
        return product if self.is_finite(factor.n) else (g == 0.0).op("where", 0.0, product)

    def is_finite(self, n: int) -> bool:
        """Tell whether a node is finite, whatever s is. A branch of torch.where may guard captured tensors, and the
        mask hides some of what they hold for rows and keys."""
        nodes, kinds = self.build.nodes, self.build.kinds
        for m in range(len(self.finite), n + 1):
            name, args = nodes[m][0], operands(nodes[m])
            self.of_entries.append(nodes[m] in (("in", "i"), ("in", "j")) or any([self.of_entries[x] for x in args]))
            match name:
                case "in":
                    finite = nodes[m][1] != "s"
                case "lit":
                    finite = not isinstance(nodes[m][1], str)
                case "load":
                    finite = self.trust_loads and not self.of_entries[m]
                case "div":
                    finite = self.finite[args[0]] and bool(literal(nodes[args[1]]))
                case _:
                    finite = name in BOUNDED or (name in KEEP_FINITE and all([self.finite[x] for x in args]))
            self.finite.append(finite or kinds[m] != "f")
        return self.finite[n]
