"""The package's files, and how they import each other: docs/internals/architecture.md's reading order holds."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilewise"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./\.\./src/tilewise/([^)]+)\)")
NAME = re.compile(r"`(\w+)`")
BACK_ENDS = ("cpu", "hopper", "triton")
UNORDERED = ("cli", "compat")
"""Folders whose rows do not name their files."""
HOSTS = ("host", "hopper", "values", "call", "attention", "cpu")
"""Folders that hold no device code themselves."""
ON_THE_HOST = ("api", "backend", "backward_launch", "in_torch", "launch", "op", "plan", "tiles")
"""Names of files that hold none, in every folder."""
MOST = 16
"""Parameters of a function."""
EXEMPT = {
    "compat/flash_attn": "another package's signatures",
    "compat/flash_attn_interface": "another package's signatures",
}


@cache
def files() -> dict[str, Path]:
    """Of each module, by its path below the package, without suffix; "hopper/__init__" is "hopper"."""
    found = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {(name.parent if name.name == "__init__" else name).as_posix(): path for name, path in found.items()}


def statements(path: Path) -> Iterator[ast.ImportFrom]:
    """Every import from this package, wherever it stands."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return (node for node in nodes if isinstance(node, ast.ImportFrom) and node.level)


@cache
def imported(name: str) -> frozenset[str]:
    """The modules that one imports, in functions, too."""
    path, found = files()[name], set()
    for node in statements(path):
        home = path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).relative_to(PACKAGE).as_posix()
        inside = {f"{home}/{alias.name}".removeprefix("./") for alias in node.names}
        modules = inside & files().keys()
        found |= modules | ({home} if modules != inside else set())
    return frozenset(found - {name})


@cache
def order() -> dict[str, tuple[int, int, int]]:
    """Where a module stands in the reading order: row, place in the row, place among the files that a row names."""
    found = {}
    for number, links, text in ROW.findall(PAGE.read_text().partition("## The narrow waist")[0]):
        for place, target in enumerate(LINK.findall(links)):
            inside = (PACKAGE / target).is_dir()
            for name in files():
                if name == target.removesuffix(".py"):
                    found[name] = (int(number), place, 1000)
                elif inside and name.startswith(f"{target}/") and name not in found:
                    own = NAME.findall(text)
                    stem = name.removeprefix(f"{target}/")
                    found[name] = (int(number), place, own.index(stem) if stem in own else 999)
    return found


def test_every_file_has_a_place_in_the_reading_order():
    assert files().keys() - order().keys() == {".", "__main__"}
    for name, (_, _, place) in order().items():
        assert place != 999 or name.startswith(UNORDERED), f"its row of architecture.md does not name {name}"


def test_no_file_imports_one_below_it():
    places = order()
    climbs = [(name, other) for name in places for other in imported(name) & places.keys()]
    assert [f"{name} imports {other}" for name, other in climbs if places[other] > places[name]] == []


def test_no_imports_go_round_in_a_circle():
    above = {name: set(imported(name)) for name in files()}
    while free := [name for name, needs in above.items() if not needs]:
        for name in free:
            del above[name]
        above = {name: needs.difference(free) for name, needs in above.items()}
    assert above == {}


def test_the_package_imports_no_study():
    for name, path in files().items():
        assert not re.search(r"^\s*(import|from) studies\b", path.read_text(), re.MULTILINE), name


def test_the_package_does_not_import_itself_by_name():
    """Under another name, as Hugging Face's kernels loads it, that would be a second copy."""
    for name, path in files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            absolute += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [found for found in absolute if (found or "").partition(".")[0] == "tilewise"], name


def test_back_ends_do_not_import_each_other():
    for name in files():
        home = name.partition("/")[0]
        if home in BACK_ENDS:
            assert not [other for other in imported(name) if other.partition("/")[0] in {*BACK_ENDS} - {home}], name


def test_tile_holds_device_code_alone_and_hosts_none():
    for name, path in files().items():
        text = path.read_text()
        if name.startswith("tile/"):
            assert {other.partition("/")[0] for other in imported(name)} <= {"tile"}, name
            assert not re.search(r"^(import|from) torch", text, re.MULTILINE), name
        if path.parent.name in HOSTS or path.stem in ON_THE_HOST:
            assert not re.search(r"^@(triton|gluon)\.jit", text, re.MULTILINE), name


def functions(name: str) -> Iterator[ast.FunctionDef]:
    """A module's functions, methods and kernels."""
    return (node for node in ast.walk(ast.parse(files()[name].read_text())) if isinstance(node, ast.FunctionDef))


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names, without * and **."""
    at = function.args
    return [one.arg for one in (*at.posonlyargs, *at.args, *at.kwonlyargs)]


def test_no_function_has_more_parameters_than_a_reader_can_hold():
    exempt = {name for name in files() if any(name == top or name.startswith(f"{top}/") for top in EXEMPT)}
    many = {
        f"{name}.{one.name}": len(parameters(one))
        for name in files().keys() - exempt
        for one in functions(name)
        if len(parameters(one)) > MOST
    }
    assert not many, f"bundle what always travels together, so that none has more than {MOST}: {many}"


def test_what_a_kernel_does_not_specialize_on_is_a_parameter():
    """Triton ignores a name that is none, and compiles again for other lengths."""
    checked = 0
    for name in files():
        given = {}
        for node in ast.walk(ast.parse(files()[name].read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                given[node.targets[0].id] = node.value
        for one in functions(name):
            for decorator in one.decorator_list:
                for keyword in getattr(decorator, "keywords", []):
                    if keyword.arg == "do_not_specialize":
                        named = set(texts(keyword.value, given))
                        assert named, f"{name}.{one.name}"
                        assert named <= set(parameters(one)), f"{name}.{one.name}: {named - set(parameters(one))}"
                        checked += 1
    assert checked > 10


def texts(node: ast.AST, given: dict[str, ast.expr]) -> Iterator[str]:
    """The strings of a list, and of the lists that it names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in given:
            yield from texts(given[part.id], given)


IDENTITY = re.compile(r"\._version\b|WeakId\w*|WeakTensor\w*|WeakKeyDictionary|\bid\(")
TENSORS = {"Mask", "MaskView", "Score", "Tensor", "Value"}


def test_nothing_is_kept_by_the_identity_of_a_tensor():
    """Masks are equal where their tensors are the same ones, so they are no keys: what tensors hold may change."""
    checked = 0
    for name in files():
        if name.partition("/")[0] not in ("parallel", "compat"):
            continue
        assert not IDENTITY.findall(files()[name].read_text()), name
        for one in functions(name):
            if any("cache" in ast.unparse(decorator) for decorator in one.decorator_list):
                annotated = {node.id for node in ast.walk(one.args) if isinstance(node, ast.Name)}
                assert not annotated & TENSORS, f"{name}.{one.name} keeps results by {annotated & TENSORS}"
                checked += 1
    assert checked > 5
