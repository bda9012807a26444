"""Programs as device functions, whose source is made from a program's text alone.

    keep(b, h, i, j, *captured)             of a mask, as those of tile/masks.py
    keys(b, i, *captured)                   of a mask of class A (program/shape.py)
    queries(b, j, *captured)
    fn(S, unit, at, *captured)              of a score, as those of tile/scores.py
    grad(dS, S, T, unit, at, *captured)
    value(dS, S, T, unit, at, *captured)    what a tensor gets where a score reads it, as those of tile/gather.py
    offset(at, *captured)                   where that lies in a contiguous tensor of its sizes, and whether it does

statements.py writes what is between their first and last lines, with the functions of tile/arithmetic.py. `arguments`
returns what they captured. Reads outside a captured tensor give 0; b and h are not compared with its sizes. Whole
numbers have 32 bits unless literals, 64-bit tensors or `Form.wide` need more; floating ones are fp32.
"""

import hashlib
import linecache
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..program.derive import BOUNDED, KEEP_FINITE, derivative, gathers
from ..program.ops import OPS
from ..program.program import Builder, Program, decode, literal, operands, with_operands
from ..program.shape import shape
from ..tile.arithmetic import floor_divide, floor_remainder, inside, power, tanh, whole
from .arguments import odd
from .statements import OUTPUT, PER_ENTRY, Form, Statements

OPEN = 1 << 30
"""No row or key is so far out (tile/masks.py)."""
OF_TILES = frozenset(("s", "g", OUTPUT))
"""Inputs with all dimensions of a tile."""

MADE = "keep", "keys", "queries", "fn", "grad", "value", "offset"


def functions(text: str, form: Form | None = None, saturated: Any = None) -> dict[str, Any]:
    """Return a program's device functions by name: "keep" of a mask, of class A "keys" and "queries", too; "fn" and
    "grad" of a score.

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
    return {name: scope[name] for name in MADE if name in scope}


def arguments(text: str, tensors: Sequence[Tensor], numbers: Sequence[Any], place: tuple[Any, ...] = ()) -> Any:
    """Return what a program's device functions captured: numbers, tensors with strides and sizes, where rows begin.

    place: (N - M,), or (cu_q, cu_k) where `Form.packed`, if the functions need it (see `needs_shift`); then what
    `Form.end` names.

    Whole numbers are `odd`, except strides and sizes `of_rows`, of which a kernel may rely on multiples of 16.
    """
    of_numbers, of_tensors = _taken(text)
    found = [_count(numbers[n]) for n in of_numbers]
    for t, rows in of_tensors:
        sizes = [n if of_row else odd(n) for n, of_row in zip(tensors[t].shape, rows, strict=True)]
        found += [tensors[t], *tensors[t].stride(), *sizes]
    return (*found, *map(_count, place))


@lru_cache(1024)
def _taken(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, tuple[bool, ...]], ...]]:
    """Return the captured numbers that a program reads, and the tensors, each with which axes are `of_rows`."""
    program = decode(text)
    rows = of_rows(program)
    of_tensors = [(t, tuple([(t, axis) in rows for axis in range(rank)])) for t, rank in _ranks(program).items()]
    return tuple([int(name[1:]) for name in _numbers(program)]), tuple(of_tensors)


@lru_cache(1024)
def is_finite(text: str, zeros: tuple[bool, ...] = ()) -> bool:
    """Tell whether a score of finite numbers is finite, but for overflow, also where captured tensors hold 0.

    zeros: which captured numbers are 0; without it, any of them may be.
    """
    program = decode(text)
    finite: list[bool] = []
    for node, kind in zip(program.nodes, program.kinds, strict=True):
        name, xs = node[0], operands(node)
        keeps = name in KEEP_FINITE or name in BOUNDED or name in ("in", "lit", "load", "exp", "exp2")
        keeps |= name == "div" and _is_not_0(program.nodes[xs[1]], zeros)
        finite.append(kind != "f" or (keeps and all([finite[x] for x in xs])))
    return finite[program.outputs[0]]


def _is_not_0(node: Any, zeros: tuple[bool, ...]) -> bool:
    """Tell whether a literal or a captured number is known not to be 0."""
    number = node[1][1:] if node[0] == "in" else ""
    return bool(literal(node)) or (number.isdigit() and bool(zeros) and not zeros[int(number)])


def _count(x: Any) -> Any:
    return odd(int(x)) if isinstance(x, int) else x


def _numbers(program: Program) -> list[str]:
    """Return the inputs that are captured numbers, in order."""
    names = [node[1] for node in program.nodes if node[0] == "in" and node[1][1:].isdigit()]
    return sorted(names, key=lambda name: int(name[1:]))


def _ranks(program: Program) -> dict[int, int]:
    """Return how many dimensions each captured tensor has, in order."""
    found = {program.nodes[n][1]: len(operands(program.nodes[n])) for n in program.loads}
    return {t: found[t] for t in sorted(found)}


def of_rows(program: Program) -> frozenset[tuple[int, int]]:
    """Return the last axes, of captured tensors, of which j is the index: neighbours lie side by side in memory, and
    are read at once where 16 divides the size."""
    loads = [(program.nodes[n][1], operands(program.nodes[n])) for n in program.loads]
    return frozenset([(t, len(xs) - 1) for t, xs in loads if xs and program.nodes[xs[-1]] == ("in", "j")])


@lru_cache(1024)
def source(text: str, form: Form, hopper: bool = False) -> str:
    """Return the source of a program's device functions."""
    program = decode(text)
    form = _widened(program, form)
    if program.kinds[program.outputs[0]] == "b":
        made = [("keep", ["b", "h", "i", "j"], _mask_lines(program, form))]
        _, _, keys, queries = shape(text)
        if keys and queries:
            made.append(("keys", ["b", "i"], _range_lines(keys, form, "i")))
            made.append(("queries", ["b", "j"], _range_lines(queries, form, "j")))
    else:
        derived = (by_output(text) if hopper else None) or derivative(text)
        made = [
            ("fn", ["S", "unit", "at"], _score_lines(program, form, hopper, "S")),
            ("grad", ["dS", "S", "T", "unit", "at"], _score_lines(derived, form, hopper, "dS")),
        ]
    return _functions(program, form, made)


def gather_functions(text: str, load: int, form: Form) -> dict[str, Any]:
    """Return the device functions "value" and "offset" of a node of a score that reads a tensor that learns."""
    return compiled(gather_source(text, load, form), None)


@lru_cache(1024)
def gather_source(text: str, load: int, form: Form) -> str:
    """Return their source."""
    program = decode(text)
    form = _widened(program, form)
    t, *index = program.nodes[load][1], *operands(program.nodes[load])
    derived = derivative(text, (t,))
    place = gathers(program, (t,)).index(load)
    value = _score_lines(_part(derived, derived.outputs[1 + place : 2 + place]), form, False, "dS")
    offset = _offset_lines(_part(program, index), t, form) if index else ["return at.b * 0, at.b >= 0"]
    return _functions(program, form, [("value", ["dS", "S", "T", "unit", "at"], value), ("offset", ["at"], offset)])


def _part(program: Program, outputs: Sequence[int]) -> Program:
    """Return the program of other outputs."""
    build = Builder()
    at = build.copy(program)
    return build.done([at[n] for n in outputs])


def _widened(program: Program, form: Form) -> Form:
    """Return a form whose whole numbers hold the program's literals."""
    large = any([node[0] == "lit" and type(node[1]) is int and abs(node[1]) >= 2**31 for node in program.nodes])
    return form._replace(wide=True) if large else form


def _captured(program: Program, form: Form) -> list[str]:
    """Return the parameters for what a program captured."""
    captured = _numbers(program)
    for t, rank in _ranks(program).items():
        captured += [f"t{t}", *[f"t{t}_{what}{axis}" for what in ("stride", "size") for axis in range(rank)]]
    if needs_shift(program, form):
        captured += ["cu_q", "cu_k"] if form.packed else ["shift"]
    return captured + [form.end] * bool(form.end)


def _functions(program: Program, form: Form, made: Sequence[tuple[str, list[str], list[str]]]) -> str:
    """Return the source of functions, given by name, parameters before what the program captured, and lines."""
    captured = _captured(program, form)
    _, of_tensors = _taken(program.text)
    axes = [(t, axis) for t, rows in of_tensors for axis, of_row in enumerate(rows) if not of_row]
    sizes = [f"t{t}_size{axis} = t{t}_size{axis} >> 1" for t, axis in axes]
    return "\n\n".join([_function(name, [*given, *captured], [*sizes, *lines]) for name, given, lines in made])


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
    writer = Statements(program, form, _inputs(program, form, i="row", j="column"))
    lines = [f"row = {_row('i', 'b', form)}", f"column = {_index('j', form)}", *writer.lines]
    (out,) = program.outputs
    found = [writer.names[out]]
    for name, least in (("i", -OPEN), ("j", 0)):
        if name not in program.reads[out]:  # a dimension that is missing
            found.append(f"({name} >= {least})")
    return [*lines, f"return {' & '.join(found)}"]


def needs_shift(program: Program, form: Form) -> bool:
    """Tell whether device functions of a program need N - M."""
    return form.rows == "first" or "shift" in program.reads[program.outputs[0]]


def _range_lines(program: Program, form: Form, of: str) -> list[str]:
    """Return the lines of a function of row i, or of key j: the keys of the row, or the rows of the key."""
    writer = Statements(program, form, _inputs(program, form, i="row", j="column"))
    ends = [writer.names[out] for out in program.outputs]
    if of == "j":
        ends = [f"({end} + {_shift('b', form)})" for end in ends] if form.rows != "last" else ends
    # kernels count in 32 bits, dropout among them, whatever the type of what was captured
    far = [f"tl.minimum(tl.maximum({end}, {-OPEN}), {OPEN})" if form.wide else end for end in ends]
    ends = [f"tl.cast({end}, tl.int32)" for end in far]
    lines = [f"row = {_row('i', 'b', form)}"] if of == "i" else [f"column = {_index('j', form)}"]
    return [*lines, *writer.lines, f"return {', '.join(ends)}"]


def _inputs(program: Program, form: Form, **names: str) -> dict[str, str]:
    """Return what a program's inputs are in a source: these names, and the whole numbers that `odd` made."""
    whole = {name: f"({name} >> 1)" for name in _numbers(program) if name[0] == "i"}
    return {"shift": _shift(names.get("b", "b"), form), **names, **whole}


def _score_lines(program: Program, form: Form, hopper: bool, given: str) -> list[str]:
    """Return the lines of a function of a tile `given`: S or dS."""
    writer, lines = _at_tile(program, form, hopper)
    out = program.outputs[0]
    found = writer.names[out]
    if form.end:  # 0 past the last row
        end = "N >> 1" if form.end == "N" else _of_sequence(form.end, "at.b")
        found = f"tl.where(at.i0 + at.i < {end}, {found}, 0.0)"
    if not program.reads[out] & OF_TILES:  # in the tile's shape and layout, which costs nothing
        found = f"tl.where({given} == {given}, {found}, {found})"
    return [*lines, f"return {found}"]


def _at_tile(program: Program, form: Form, hopper: bool = False) -> tuple[Statements, list[str]]:
    """Return what has written a program's statements for the entries `at`, and all lines so far."""
    names = {"g": "dS", OUTPUT: "T", "b": "at.b", "h": "at.h", "i": "(row0 + row)", "j": "(column0 + column)"}
    writer = Statements(program, form, _inputs(program, form, **names), tile=True, hopper=hopper)
    lines = [f"row0 = {_row('at.i0', 'at.b', form)}", f"column0 = {_index('at.j0', form)}"]
    return writer, [*lines, "row = at.i", "column = at.j", "s = S * unit", *writer.lines]


def _offset_lines(program: Program, t: int, form: Form) -> list[str]:
    """Return the lines of a function of where a tensor's entries lie, whose outputs are the indices into it."""
    writer, lines = _at_tile(program, form)
    before = len(writer.lines)
    found = [writer.index(f"y{axis}", t, axis, x) for axis, x in enumerate(program.outputs)]
    offset = "0"
    for axis, (at, _) in enumerate(found):
        offset = f"({offset}) * t{t}_size{axis} + tl.cast({at}, tl.int64)" if axis else f"tl.cast({at}, tl.int64)"
    checks = [check for _, check in found if check] or ["(at.b >= 0)"]
    return [*lines, *writer.lines[before:], f"return {offset}, {' & '.join(checks)}"]


def _index(name: str, form: Form) -> str:
    return f"tl.cast({name}, tl.int64)" if form.wide else name


def _row(name: str, b: str, form: Form) -> str:
    """Return a row as the function counts it, in place of a kernel's, which begins at N - M."""
    return _index(name if form.rows == "last" else f"{name} - {_shift(b, form)}", form)


def _shift(b: str, form: Form) -> str:
    """Return N - M."""
    if not form.packed:
        return "(shift >> 1)"
    return f"({_of_sequence('cu_k', b)} - {_of_sequence('cu_q', b)}).to(tl.int32)"


def _of_sequence(cu: str, b: str) -> str:
    """Return the length of a sequence."""
    return f"(tl.load({cu} + {b} + 1) - tl.load({cu} + {b}))"


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
    at, of_derived = both.copy(program), both.copy(derived)
    rule: Any = OPS[name].derivative
    (factor,) = rule(both.wrap(at[n]), both.wrap(at[xs[0]]))
    moved: list[int] = []
    for m, node in enumerate(both.nodes):
        x = y if m == at[n] else build.wrap(build.add(with_operands(node, [moved[x] for x in operands(node)])))
        moved.append(x.op("max", 0.0).n if m == factor.n and name in ("tanh", "sigmoid") else x.n)
    found = build.done([moved[of_derived[derived.outputs[0]]]])
    return None if "s" in found.reads[found.outputs[0]] else found
