"""Functions that no program can be: the message says which function, which line, what was met, and the remedy.

Nothing has run or changed when the error comes: the captured tensors and the generator of random numbers are checked.
"""

import inspect
import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tilewise.program import trace

TABLE = torch.randn(3, 5, requires_grad=True)
PLAIN = torch.randn(3, 5)
OK, FLAG = torch.ones(5, dtype=torch.bool), torch.tensor(True)
ARRAY, LIST, DICT = np.ones(5), [1, 2, 3], {0: 1.0}

CHOICE = (
    "`if`, `while`, `and`, `or`, `not`, `assert`, `bool()`, `min()`, `max()` and chained comparisons such as "
    "`0 <= x < 4` need one truth value, and this one differs from entry to entry; write "
    "torch.where(condition, a, b), or &, | and ~ with brackets around comparisons"
)
NUMBER = (
    "`range()`, `int()`, `float()`, `.item()`, functions of `math` and indices into a list, a dict or a NumPy array "
    "need one number, and this one differs from entry to entry; write torch's function, "
    "or capture torch.as_tensor(array)"
)
NOT_POINTWISE = (
    "`{}` is no pointwise operation that kernels can compute; tilewise.program.FUNCTIONS lists those that are"
)
CHANGE = (
    "`{}` changes a tensor in place; make a new one: x * 2 instead of x.mul_(2), "
    "torch.where(i == j, 0, x) instead of x[i] = 0"
)
RANDOM = "`{}` draws random numbers; use attention's dropout=, or capture a tensor of random numbers"
NOT_INDEXED = (
    "a captured tensor is used as a number with {} of its 2 dimensions not indexed; index every dimension: x[b, h]"
)
NO_INDEX = "an index must be a whole number, got {}; index all of the tensor's 2 dimensions by numbers"
CONTENTS = (
    "`{}` reads the contents of a captured tensor while the function is traced, and calls would not see new ones; "
    "index the tensor and use torch.where, or compute the number outside of the function"
)


def branches(s, b, h, i, j):
    if i > j:  # met
        return s
    return s * 2


def loops(b, h, i, j):
    n = i
    while n > j:  # met
        n = n // 2
    return n == j


def asserts(s, b, h, i, j):
    assert i >= 0  # met
    return s


def ranges(s, b, h, i, j):
    for n in range(i):  # met
        s = s + n
    return s


def writes(s, b, h, i, j):
    TABLE[h, i] = 0  # met
    return s


def writes_to_a_plain_tensor(s, b, h, i, j):
    table = PLAIN
    table += 1  # met
    return s + table[h, i]


def writes_to_the_score(s, b, h, i, j):
    s[0] = 1  # met
    return s


def power(x):
    return math.exp(x)  # met


def by_a_helper(s, b, h, i, j):
    return s + power(i)


def generates(b, h, i, j):
    yield i > j


REFUSED = {
    "if": ("score", branches, CHOICE),
    "while": ("mask", loops, CHOICE),
    "assert": ("score", asserts, CHOICE),
    "and": ("mask", lambda b, h, i, j: i > j and OK[j], CHOICE),
    "or": ("mask", lambda b, h, i, j: i > j or j < 3, CHOICE),
    "not": ("mask", lambda b, h, i, j: not i, CHOICE),
    "chained": ("mask", lambda b, h, i, j: 0 <= i - j < 4, CHOICE),
    "bool": ("mask", lambda b, h, i, j: bool(i), CHOICE),
    "any": ("mask", lambda b, h, i, j: any([i > j, j > i]), CHOICE),
    "max": ("score", lambda s, b, h, i, j: max(s, 0), CHOICE),
    "in": ("mask", lambda b, h, i, j: i in (1, 2), CHOICE),
    "if of a captured entry": ("score", lambda s, b, h, i, j: s if TABLE[0, 0] > 0 else -s, CHOICE),
    "range": ("score", ranges, NUMBER),
    "int": ("score", lambda s, b, h, i, j: s + int(i), NUMBER),
    "float": ("score", lambda s, b, h, i, j: s + float(i), NUMBER),
    "round": ("score", lambda s, b, h, i, j: round(s), NUMBER),
    "item": ("score", lambda s, b, h, i, j: s + i.item(), NUMBER),
    "math.exp": ("score", by_a_helper, NUMBER),
    "math.floor": ("score", lambda s, b, h, i, j: math.floor(s), NUMBER),
    "a list": ("score", lambda s, b, h, i, j: s + LIST[i], NUMBER),
    "a dict": ("score", lambda s, b, h, i, j: s + DICT[h], NUMBER),
    "an array": ("score", lambda s, b, h, i, j: s + ARRAY[i], NUMBER),
    "len": ("score", lambda s, b, h, i, j: len(s), NUMBER),
    "iteration": ("score", lambda s, b, h, i, j: list(s), NUMBER),
    "contents": ("score", lambda s, b, h, i, j: s + TABLE.sum().item(), CONTENTS.format("item")),
    "contents, if": ("score", lambda s, b, h, i, j: s if FLAG else -s, CONTENTS.format("bool")),
    "sum": ("score", lambda s, b, h, i, j: s.sum(), NOT_POINTWISE.format("sum")),
    "cumsum": ("score", lambda s, b, h, i, j: torch.cumsum(s, 0), NOT_POINTWISE.format("cumsum")),
    "softmax": ("score", lambda s, b, h, i, j: F.softmax(s, -1), NOT_POINTWISE.format("softmax")),
    "matmul": ("score", lambda s, b, h, i, j: torch.matmul(TABLE, s), NOT_POINTWISE.format("matmul")),
    "@": ("score", lambda s, b, h, i, j: s @ s, NOT_POINTWISE.format("@")),
    "sort": ("score", lambda s, b, h, i, j: s.sort(), NOT_POINTWISE.format("sort")),
    "stack": ("score", lambda s, b, h, i, j: torch.stack([s, s]), NOT_POINTWISE.format("stack")),
    "a reduction": ("score", lambda s, b, h, i, j: s.max(), NOT_POINTWISE.format("max")),
    "T": ("score", lambda s, b, h, i, j: s.T, NOT_POINTWISE.format("T")),
    "in a tensor": ("mask", lambda b, h, i, j: i in OK, NOT_POINTWISE.format("contains")),
    "a row": ("score", lambda s, b, h, i, j: s + TABLE[h], NOT_INDEXED.format(1)),
    "two rows": ("score", lambda s, b, h, i, j: s + TABLE[h] * TABLE[b], NOT_INDEXED.format(1)),
    "a row's sum": ("score", lambda s, b, h, i, j: s + TABLE[h].sum(), NOT_INDEXED.format(1)),
    "exp of a row": ("score", lambda s, b, h, i, j: s + torch.exp(TABLE[h]), NOT_INDEXED.format(1)),
    "a whole tensor": ("score", lambda s, b, h, i, j: s + TABLE, NOT_INDEXED.format(2)),
    "where": ("score", lambda s, b, h, i, j: torch.where(i > j, TABLE, s), NOT_INDEXED.format(2)),
    "a slice": ("score", lambda s, b, h, i, j: s + TABLE[:, i], NO_INDEX.format("a slice")),
    "a new dimension": ("score", lambda s, b, h, i, j: s + TABLE[None, i], NO_INDEX.format("None")),
    "...": ("score", lambda s, b, h, i, j: s + TABLE[..., i], NO_INDEX.format("...")),
    "a floating index": (
        "score", lambda s, b, h, i, j: s + TABLE[h, i / 2],
        "an index must be a whole number, got a floating one; convert it with .long()",
    ),
    "a bool as index": (
        "score", lambda s, b, h, i, j: s + TABLE[h, i > j],
        "an index must be a whole number, got a bool; convert it with .long()",
    ),
    "too many indices": (
        "score", lambda s, b, h, i, j: s + TABLE[h][i, j],
        "3 indices are too many for a captured tensor of 2 dimensions; give one for each dimension",
    ),
    "an index into a number": (
        "score", lambda s, b, h, i, j: s[0], "an index is too many for a number; index captured tensors alone",
    ),
    "a list in arithmetic": (
        "score", lambda s, b, h, i, j: s * LIST,
        "list [1, 2, 3] is no number; capture arrays and lists as tensors, torch.as_tensor(x)",
    ),
    "an array in arithmetic": (
        "score", lambda s, b, h, i, j: ARRAY * s,
        "ndarray array([1., 1., 1., 1., 1.]) is no number; capture arrays and lists as tensors, torch.as_tensor(x)",
    ),
    "mul_": ("score", lambda s, b, h, i, j: s + TABLE.mul_(2)[h, i], CHANGE.format("mul_")),
    "mul_ of the score": ("score", lambda s, b, h, i, j: s.mul_(2), CHANGE.format("mul_")),
    "x[i] = 0": ("score", writes, CHANGE.format("setitem")),
    "+=": ("score", writes_to_a_plain_tensor, CHANGE.format("add_")),
    "s[i] = 0": ("score", writes_to_the_score, CHANGE.format("setitem")),
    "out": ("score", lambda s, b, h, i, j: torch.add(s, 1, out=PLAIN), CHANGE.format("add(out=...)")),
    "out of captured": ("score", lambda s, b, h, i, j: torch.exp(PLAIN, out=PLAIN), CHANGE.format("exp(out=...)")),
    "inplace": ("score", lambda s, b, h, i, j: F.relu(s, inplace=True), CHANGE.format("relu(inplace=...)")),
    "backward": ("score", lambda s, b, h, i, j: TABLE.sum().backward(), CHANGE.format("backward")),
    "rand": ("score", lambda s, b, h, i, j: s + torch.rand(()), RANDOM.format("rand")),
    "randn_like": ("score", lambda s, b, h, i, j: s + torch.randn_like(s), RANDOM.format("randn_like")),
    "dropout": ("score", lambda s, b, h, i, j: F.dropout(s), RANDOM.format("dropout")),
    "a module": ("score", lambda s, b, h, i, j: torch.nn.Dropout()(s), RANDOM.format("dropout")),
    "bernoulli": ("mask", lambda b, h, i, j: torch.bernoulli(TABLE[h, i]) > 0, RANDOM.format("bernoulli")),
    "uniform_": ("score", lambda s, b, h, i, j: s + PLAIN.uniform_()[h, i], CHANGE.format("uniform_")),
    "& of numbers": (
        "score", lambda s, b, h, i, j: s & 1,
        "`and` takes bools or whole numbers, not floating ones; convert them with .long()",
    ),
    "- of bools": (
        "mask", lambda b, h, i, j: (i > j) - (j > i),
        "`sub` does not take bools; convert them with .long(), or write ~x, x ^ y",
    ),
    "a whole power": (
        "score", lambda s, b, h, i, j: s * 2**h,
        "a power of whole numbers must be a number of at most 8; write 2.0 ** x for a floating power",
    ),
    "arguments": (
        "score", lambda s, b, h, i, j: s.clamp(minimum=0),
        "`clamp` does not take these arguments here; tilewise.program.FUNCTIONS has the functions with theirs",
    ),
    "a mask of numbers": ("mask", lambda b, h, i, j: i - j, "it must return a bool, got a number; write x != 0"),
    "a score of bools": (
        "score", lambda s, b, h, i, j: i > j,
        "it must return a number, got a bool; write torch.where(seen, s, -float('inf'))",
    ),
    "None": (
        "score", lambda s, b, h, i, j: None, "it must return a number, got None; write `return` before the result",
    ),
    "a tuple": ("score", lambda s, b, h, i, j: (s, s), "it must return a number, got a tuple; return one value"),
    "a generator": ("mask", generates, "it must return a bool, got a generator; return one value"),
    "a tensor": (
        "mask", lambda b, h, i, j: OK,
        "it must return a bool, got a tensor: a captured tensor is used as a number with 1 of its 1 dimensions not "
        "indexed; index every dimension: x[b]",
    ),
    "a row as result": (
        "score", lambda s, b, h, i, j: TABLE[h], "it must return a number, got a tensor: " + NOT_INDEXED.format(1),
    ),
    "few parameters": (
        "mask", lambda b, h, i: i > h,
        "it must take (b, h, i, j), got (b, h, i); change it, or close over other values",
    ),
    "a mask as score": (
        "score", lambda b, h, i, j: i > j,
        "it must take (s, b, h, i, j), got (b, h, i, j); change it, or close over other values",
    ),
    "a parameter by name": (
        "mask", lambda b, h, i, j, *, width: i > j,
        "it must take (b, h, i, j), got (b, h, i, j, *, width); change it, or close over other values",
    ),
    "complex": (
        "score", lambda s, b, h, i, j: s + PLAIN.to(torch.complex64)[h, i],
        "a captured tensor must be bool, a signed or 8-bit integer, or fp16 to fp64, got torch.complex64; convert it",
    ),
    "sparse": (
        "score", lambda s, b, h, i, j: s + PLAIN.to_sparse()[h, i],
        "a captured tensor must be strided, got layout torch.sparse_coo; convert it with .to_dense()",
    ),
    "meta": (
        "score", lambda s, b, h, i, j: s + PLAIN.to("meta")[h, i],
        "a captured tensor must hold numbers, got one on the meta device; create it on the device of q",
    ),
    "a long loop": (
        "mask", lambda b, h, i, j: sum([(i * n) % 7 for n in range(3000)]) > 0,
        "its program has 182772 characters, more than 65536; index a tensor instead of unrolling a loop",
    ),
}  # fmt: skip
TYPE_ERRORS = ("a mask of", "a score of", "None", "a tuple", "a generator", "a tensor", "a row as result", "few")
TYPE_ERRORS += ("a mask as", "a parameter", "complex", "sparse", "meta")


def line_of(fn):
    """Return the number and the text of the line marked `met` in what a function calls, or of its own first line."""
    lines, first = inspect.getsourcelines(power if fn is by_a_helper else fn)
    found = [(first + n, line.strip()) for n, line in enumerate(lines) if "# met" in line]
    return found[0] if found else (fn.__code__.co_firstlineno, lines[0].strip())


def message_of(what, fn, captured=()):
    """Return the error of a trace that changes nothing."""
    before, state = [TABLE.clone(), PLAIN.clone()], torch.get_rng_state()
    with pytest.raises((TypeError, ValueError)) as caught:
        trace(fn, what, captured)
    assert torch.equal(TABLE, before[0])
    assert torch.equal(PLAIN, before[1])
    assert TABLE.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.zeros(()) + 1 == 1
    return caught


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    what, fn, words = REFUSED[name]
    caught = message_of(what, fn)
    number, text = line_of(fn)
    line = __file__ + ":" + str(number)
    assert str(caught.value).startswith(f"{what} {fn.__name__} ({line}: ")
    assert str(caught.value) == f"{what} {fn.__name__} ({line}: {text}): {words}"
    assert caught.type is (TypeError if name.startswith(TYPE_ERRORS) else ValueError)


@pytest.mark.parametrize(
    ("captured", "got"),
    [
        ("text", "str 'text'"),
        ({"a": 1}, "dict {'a': 1}"),
        ([1.0], "list [1.0]"),
        (None, "NoneType None"),
        (1j, "complex 1j"),
        (np.ones(2), "ndarray array([1., 1.])"),
        (operator.add, "builtin_function_or_method <built-in function add>"),
    ],
)
def test_captured_values_of_other_types(captured, got):
    caught = message_of("mask", lambda b, h, i, j, x: i > j, (captured,))
    remedy = "convert it with torch.as_tensor(...), or close over it"
    assert str(caught.value).endswith(f"): a captured value must be a tensor or a number, got {got}; {remedy}")
    assert caught.type is TypeError


def test_captured_tensors_of_other_types():
    assert "got torch.float8_e4m3fn" in str(
        message_of("mask", lambda *at: at[0] > 0, (PLAIN.to(torch.float8_e4m3fn),)).value
    )
    assert trace(lambda b, h, i, j, x: i > x[j], "mask", (torch.nn.Parameter(torch.zeros(3)),)).tensors


def test_a_parameter_for_each_captured_value():
    caught = message_of("score", lambda s, b, h, i, j, x: s, (1.0, TABLE))
    assert (
        "it must take (s, b, h, i, j) and one parameter for each of 2 captured values, got (s, b, h, i, j, x)"
        in str(caught.value)
    )


def test_what_is_no_function():
    import tilewise as tw

    assert str(message_of("mask", 3).value) == "mask must be a function of (b, h, i, j), got 3; write one, or a Mask"
    assert (
        str(message_of("mask", tw.Causal).value)
        == "mask must be a function of (b, h, i, j), got the class Causal; write Causal(...)"
    )
    assert "score must be a function of (s, b, h, i, j), got " in str(message_of("score", None).value)


def test_functions_without_a_line():
    """Those typed into an interpreter have no text, builtin ones no file."""
    space = {}
    exec(compile("def typed(b, h, i, j):\n    return i and j", "<stdin>", "exec"), space)
    assert str(message_of("mask", space["typed"]).value) == f"mask typed (<stdin>:2): {CHOICE}"
    assert str(message_of("mask", max).value) == f"mask max: {CHOICE}"


def test_a_decorated_function_begins_after_its_decorators():
    def same(fn):
        return fn

    @same
    def near(b, h, i, j):
        return i - j

    number = near.__code__.co_firstlineno + 1
    assert f"mask near ({__file__}:{number}: def near(b, h, i, j):): it must" in str(message_of("mask", near).value)


def test_methods_and_objects_have_the_name_of_their_function():
    class Model:
        def near(self, b, h, i, j):
            return i and j

        def __call__(self, b, h, i, j):
            return i or j

    assert str(message_of("mask", Model().near).value).startswith(f"mask near ({__file__}:")
    assert str(message_of("mask", Model()).value).startswith(f"mask __call__ ({__file__}:")
