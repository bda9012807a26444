"""Count what makes the package hard to change, and hold each count against its limit: python tools/limits.py.

`make lint` prints the table, and tests/test_limits.py fails where a count exceeds its limit. A change that needs a
higher limit needs an ADR. Where a limit is not yet what we aim at, it is today's count: it may fall, and not rise.
"""

import ast
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilewise"
DEVICE = ("jit", "constexpr_function")
"""Decorators of device code."""
SIGNATURES = ("compat/flash_attn/", "compat/flash_attn_interface.py")
"""Files with another package's signatures."""
LAYOUT = {"Cached", "Layout", "Padded", "Varlen", "layout", "varlen"}
EIGHT_BITS = {"EIGHT_BITS", "EightBits", "PV_BITS", "QK_BITS", "Quantized", "codes", "codes_of_v", "scaled", "scales"}
"""Names in tests that ask for a layout, or for 8 bits."""
OWN = {*(f"values/{name}.py" for name in ("layout", "cached", "products", "quantized")), "hopper/forward/eight_bits.py"}
"""The values' own files, which may ask, and the file in which device code is compiled for 8 bits."""
OURS = {f"{name}.py" for name in ("values/masks", "values/intervals", "values/tables", "values/score")}
OURS |= {"tile/masks.py", "tile/scores.py"}
"""Our own masks and scores, and their device functions."""
OF_TORCH = {"strided", "type"}
"""Names beside which a layout is a tensor's own."""
LONGEST, WIDEST, LARGEST, HEAVIEST = 80, 16, 400, 100_000
"""Lines of a function, its parameters, lines of a file, bytes of a generated file."""


class Count(NamedTuple):
    """One line of the table."""

    what: str
    found: int
    limit: int
    aim: int | None = None
    """The limit that we aim at, if it is another."""
    where: tuple[str, ...] = ()
    """What is counted, if it is few."""


@cache
def tree(file: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(file.read_text())


def files(folder: Path) -> list[Path]:
    """Return a folder's Python files."""
    return sorted(folder.rglob("*.py"))


def name_of(file: Path) -> str:
    """Return a file's path in the package, or in the checkout."""
    return file.relative_to(PACKAGE if file.is_relative_to(PACKAGE) else ROOT).as_posix()


def room_of(file: Path) -> str:
    """Return the folder of a file, or the file at the package's top."""
    folder = file.parent.relative_to(PACKAGE).as_posix()
    return file.stem if folder == "." else folder


def imported(file: Path) -> Iterator[Path]:
    """Yield the package's files that a file imports, in functions, too."""
    for node in ast.walk(tree(file)):
        if not (isinstance(node, ast.ImportFrom) and node.level):
            continue
        home = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            own = (
                home / f"{alias.name}.py",
                home / alias.name / "__init__.py",
                home.with_suffix(".py"),
                home / "__init__.py",
            )
            yield next(path for path in own if path.is_file())


def rooms() -> dict[str, set[str]]:
    """Return for each room the others that its files import. The package's own `__init__` and `__main__` are none."""
    found: dict[str, set[str]] = {}
    for file in files(PACKAGE):
        room = room_of(file)
        if room in ("__init__", "__main__"):
            continue
        others = {room_of(other) for other in imported(file)} - {room, "__init__"}
        found.setdefault(room, set()).update(others)
    return found


def floors(above: Mapping[str, set[str]]) -> dict[str, int]:
    """Return how many rooms lie below each, at most; rooms that import each other in a circle share a floor."""
    reach = {room: _reached(room, above) for room in above}
    group = {room: frozenset(o for o in reach[room] if room in reach[o]) | {room} for room in above}

    @cache
    def floor(own: frozenset[str]) -> int:
        below = {group[other] for room in own for other in above[room]} - {own}
        return 1 + max(map(floor, below), default=0)

    return {room: floor(group[room]) for room in above}


def _reached(room: str, above: Mapping[str, set[str]]) -> set[str]:
    found, left = set(), [room]
    while left:
        new = above[left.pop()] - found
        found |= new
        left += new
    return found


def circles(above: Mapping[str, set[str]]) -> list[str]:
    """Return the arrows between rooms on one floor, of which neither is above the other. A folder and one inside it are
    no two rooms here."""
    on = floors(above)
    level = [(room, other) for room in sorted(above) for other in sorted(above[room]) if on[room] == on[other]]
    return [
        f"{room} -> {other}"
        for room, other in level
        if not f"{room}/".startswith(f"{other}/") and not f"{other}/".startswith(f"{room}/")
    ]


def functions(those: Iterable[Path]) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Yield each function with its name and whether it is device code."""
    for file in those:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef):
                marks = " ".join(map(ast.unparse, node.decorator_list))
                yield f"{name_of(file)}: {node.name}", node, any(mark in marks for mark in DEVICE)


def parameters(node: ast.FunctionDef) -> int:
    """Count parameters, without * and **."""
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def branches(file: Path, *names: str) -> int:
    """Count `if` statements and conditional expressions in functions of a file."""
    own = [node for _, node, _ in functions([file]) if node.name in names]
    return sum(isinstance(node, (ast.If, ast.IfExp)) for one in own for node in ast.walk(one))


def asked(those: Iterable[Path], names: set[str]) -> list[str]:
    """Return where a test names one of these, outside the values' own files: in if, while, a conditional expression, a
    comprehension, or as what is returned or assigned."""
    nodes = [(file, node) for file in those if name_of(file) not in OWN for node in ast.walk(tree(file))]
    return [
        name_of(file)
        for file, node in nodes
        if any(names & found and not OF_TORCH & found for found in map(_names, _tests(node)))
    ]


def _tests(node: ast.AST) -> Sequence[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, (ast.Return, ast.Assign)) and isinstance(node.value, (ast.Compare, ast.BoolOp)):
        return [node.value]
    return []


def _names(test: ast.expr) -> set[str]:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}


def kept() -> list[str]:
    """Return the functions that keep what they return by a Problem."""
    return [
        name
        for name, node, _ in functions(files(PACKAGE))
        if any("cache" in ast.unparse(mark) for mark in node.decorator_list)
        and any(one.annotation and "Problem" in ast.unparse(one.annotation) for one in node.args.args)
    ]


def generated() -> list[str]:
    """Return large JSON files in git that a command wrote, beside results."""
    listed = subprocess.run(["git", "ls-files", "*.json"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    own = [name for name in listed.split() if not name.startswith("benchmarks/")]
    return [name for name in own if (ROOT / name).stat().st_size > HEAVIEST]


def counts() -> list[Count]:
    """Return the table."""
    package, studies = files(PACKAGE), files(ROOT / "studies")
    above = rooms()
    top = [room for room in above if (PACKAGE / f"{room}.py").is_file()]
    long = [name for name, node, _ in functions(package) if (node.end_lineno or 0) - node.lineno + 1 > LONGEST]
    own = [file for file in package if not name_of(file).startswith(SIGNATURES)]
    wide = [name for name, node, device in functions(own) if not device and parameters(node) > WIDEST]
    large = [name_of(file) for file in (*package, *studies) if len(file.read_text().splitlines()) > LARGEST]
    lines = sum(len(file.read_text().splitlines()) for file in package)
    ours = sum(len(file.read_text().splitlines()) for file in package if name_of(file) in OURS)
    forward = branches(PACKAGE / "hopper" / "forward" / "attend.py", "attend", "loop_over_keys")
    return [
        Count("rooms: folders and files at the top", len(above), 29, 28),
        Count("floors of rooms, by imports", max(floors(above).values()), 11),
        Count("arrows between rooms of one floor", len(circles(above)), 0, None, tuple(circles(above))),
        Count("files at the top", len(top), 14, None, tuple(top)),
        Count(f"functions over {LONGEST} lines", len(long), 0, None, tuple(long)),
        Count(f"functions over {WIDEST} parameters, no device code", len(wide), 0, None, tuple(wide)),
        Count(f"files over {LARGEST} lines, of studies, too", len(large), 1, None, tuple(large)),
        Count("branches of Hopper's forward", forward, 20),
        Count("questions of a layout", len(asked(package, LAYOUT)), 25),
        Count("questions of 8 bits", len(asked(package, EIGHT_BITS)), 30),
        Count("functions that keep by a Problem", len(kept()), 2),
        Count(f"generated files over {HEAVIEST // 1000} kB in git", len(generated()), 0, None, tuple(generated())),
        Count("lines of our masks and scores, device code, too", ours, 900),
        Count("lines of src", lines, 35_270, 24_400),
    ]


def main() -> None:
    """Print the table."""
    print(f"{'what':52}{'found':>8}{'limit':>8}{'aim':>8}")
    for one in counts():
        print(f"{one.what:52}{one.found:>8}{one.limit:>8}{one.limit if one.aim is None else one.aim:>8}")
        print(*(f"    {each}\n" for each in one.where), sep="", end="")


if __name__ == "__main__":
    main()
