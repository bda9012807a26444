"""Programs and their Builder: simplifications, kinds, inputs, and literals that Python confuses."""

import math

import pytest

from tilewise.program import Program, decode
from tilewise.program.program import Builder, literal


def built(make):
    """Return the nodes of an expression of s, i, j and a bool."""
    build = Builder()
    names = ("s", "i", "j", "b0")
    return build.done([make(*[build.wrap(build.add(("in", name))) for name in names]).n])


S, I = ("in", "s"), ("in", "i")
NEUTRAL = {
    "plus zero": lambda s, i, j, p: 0 + (s + 0.0) - 0,
    "times one": lambda s, i, j, p: 1 * (s * 1.0) / 1,
    "minus twice": lambda s, i, j, p: (-s).op("neg"),
    "cast": lambda s, i, j, p: s.cast("f"),
    "smallest of equals": lambda s, i, j, p: s.op("min", s).op("max", s),
    "always": lambda s, i, j, p: (s.build.wrap(s.build.literal(True))).op("where", s, i * 2.0),
    "never": lambda s, i, j, p: (s.build.wrap(s.build.literal(False))).op("where", i * 2.0, s),
    "either": lambda s, i, j, p: p.op("where", s, s),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_elements_are_dropped(name):
    assert built(NEUTRAL[name]).nodes == (S,)


def test_neutral_elements_of_whole_numbers_and_bools():
    assert built(lambda s, i, j, p: (i // 1) | 0 ^ 0).nodes == (I,)
    assert built(lambda s, i, j, p: (p & True) | False).nodes == (("in", "b0"),)
    assert built(lambda s, i, j, p: p & False).nodes == (("lit", False),)
    assert built(lambda s, i, j, p: p | True).nodes == (("lit", True),)
    assert built(lambda s, i, j, p: ~~p).nodes == (("in", "b0"),)
    assert built(lambda s, i, j, p: i & 1).nodes == (I, ("lit", 1), ("and", 0, 1))
    assert built(lambda s, i, j, p: i * -1).nodes == (I, ("neg", 0))
    assert built(lambda s, i, j, p: (~p).op("where", i, j)).nodes[-1] == ("where", 2, 1, 0)


def test_what_looks_neutral_and_is_not():
    """A zero of another kind changes the kind; 0 * s is NaN where s is infinite."""
    assert built(lambda s, i, j, p: i + 0.0).nodes == (I, ("cast", "f", 0))
    assert built(lambda s, i, j, p: s * 0.0).nodes[-1] == ("mul", 0, 1)
    assert built(lambda s, i, j, p: s - s).nodes[-1] == ("sub", 0, 0)
    assert built(lambda s, i, j, p: 1 / s).nodes[-1] == ("div", 1, 0)
    assert built(lambda s, i, j, p: 0 - s).nodes[-1] == ("sub", 1, 0)


def test_numbers_are_folded():
    two = lambda s: s.build.wrap(s.build.literal(2))  # noqa: E731
    assert built(lambda s, i, j, p: s * (two(s) * 3 + 0.5)).nodes[1] == ("lit", 6.5)
    assert built(lambda s, i, j, p: s * (two(s) / 4).op("log2")).nodes == (S, ("neg", 0))
    assert built(lambda s, i, j, p: i + (two(s) // -4)).nodes[1] == ("lit", -1)
    assert built(lambda s, i, j, p: i + (two(s) * 0.7).cast("i")).nodes[1] == ("lit", 1)
    assert built(lambda s, i, j, p: s / (two(s) - 2.0)).nodes[1] == ("lit", 0.0)
    assert built(lambda s, i, j, p: s + 1.0 / (two(s) - 2.0)).nodes[1] == ("lit", "inf")


def test_equal_nodes_are_one_and_dead_ones_go():
    program = built(lambda s, i, j, p: [s * j, (s + i) * (s + i)][1])
    assert program.nodes == (S, I, ("cast", "f", 1), ("add", 0, 2), ("mul", 3, 3))


def test_literals_that_python_takes_for_equal():
    """1, 1.0 and True; 0.0 and -0.0; numbers that have no literal."""
    build = Builder()
    numbers = [1, 1.0, True, 0, 0.0, -0.0, False, math.inf, -math.inf, math.nan]
    assert [build.literal(x) for x in numbers + numbers] == [*range(10), *range(10)]
    text = build.done(range(10)).text
    back = [literal(node) for node in decode(text).nodes]
    assert [repr(x) for x in back] == [repr(x) for x in numbers]
    assert decode(text) == build.done(range(10))
    assert decode(text).kinds == list("ifbiffbfff")
    texts = [Program((("lit", x),), (0,)).text for x in (1, 1.0, True)]
    assert [decode(text).kinds for text in texts] == [["i"], ["f"], ["b"]]


def test_kinds_and_inputs():
    program = built(lambda s, i, j, p: (s * i > j) & p)
    assert program.kinds == ["f", "i", "i", "b", "f", "f", "f", "b", "b"]
    assert program.reads[-1] == {"s", "i", "j", "b0"}
    assert program.reads[5] == {"s", "i"}
    assert decode("((('in','g'),('in','gg'),('in','f12'),('in','i3')),(0,))").kinds == ["f", "f", "f", "i"]
    assert decode("((('in','h'),('load',2,'i',0),('load',0,'f',1,0)),(2,))").loads == (1, 2)
    assert decode("((('in','h'),('load',2,'i',0),('load',0,'f',1,0)),(2,))").reads[2] == {"h"}


def test_kinds_that_operations_refuse():
    for make in (
        lambda s, i, j, p: s & i,
        lambda s, i, j, p: s << 1,
        lambda s, i, j, p: i >> s,
        lambda s, i, j, p: p - p,
        lambda s, i, j, p: -p,
        lambda s, i, j, p: p % p,
        lambda s, i, j, p: abs(p),
    ):
        with pytest.raises(ValueError, match="convert them with"):
            built(make)


def test_a_program_is_shown_as_what_makes_it():
    program = built(lambda s, i, j, p: s * 2.0)
    assert repr(program) == "decode(\"((('in','s'),('lit',2.0),('mul',0,1)),(2,))\")"
    assert program != "something else"
