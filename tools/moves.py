"""Shows that a commit only moves code: every definition before it is there after it, with the same syntax tree.

python tools/moves.py               what lies between HEAD~1 and HEAD, under src and studies
python tools/moves.py REF REF       between any two revisions; "." is this checkout

It compares functions and classes, with their decorators and docstrings, and all other statements but imports of files.
What follows a move does not count: names of imported modules, imports in functions, docstrings of files, and names of
files in others. It prints which files definitions went to, then those that differ; with any, its exit status is 1.
"""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "studies")
PACKAGES = {"tilewise": Path("src/tilewise"), "studies": Path("studies")}
Definition = tuple[str, str]
"""A name, and the syntax tree as text."""


def files(ref: str) -> dict[str, str]:
    """Return the sources of the package and of the studies at a revision, by path."""
    if ref == ".":
        found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
        return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}
    listed = git("ls-tree", "-r", "--name-only", ref, *FOLDERS).splitlines()
    return {path: git("show", f"{ref}:{path}") for path in listed if path.endswith(".py")}


def git(*arguments: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


class Names(ast.NodeTransformer):
    """Take out imports, and names of imported modules."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("a module", node.ctx) if node.id in self.modules else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Join a docstring's lines, and leave out names of files, which may have moved."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Expr(ast.Constant(re.sub(r"[\w/]+\.py\b", "a file", " ".join(node.value.value.split()))))
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if folder_of(Path(), node) else node


def definitions(path: str, text: str, paths: set[str]) -> Iterator[Definition]:
    """Yield what a file defines at its top level."""
    tree = ast.parse(text)
    modules = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in ours(path, node, paths)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or (node is tree.body[0] and ast.get_docstring(tree)):
            continue
        name = getattr(node, "name", None) or ast.unparse(node).partition("\n")[0][:60]
        yield name, ast.dump(Names(modules).visit(node))


def ours(path: str, node: ast.ImportFrom, paths: set[str]) -> Iterator[str]:
    """Yield the names that an import gives to modules of the package."""
    if folder := folder_of(Path(path), node):
        for alias in node.names:
            if f"{folder / alias.name}.py" in paths or f"{folder / alias.name}/__init__.py" in paths:
                yield alias.asname or alias.name


def folder_of(path: Path, node: ast.ImportFrom) -> Path | None:
    """Return where a file's import looks, if that is in the package or the studies."""
    if node.level:
        return [path, *path.parents, *[Path()] * node.level][node.level].joinpath(*(node.module or "").split("."))
    first, *rest = (node.module or "").split(".")
    return PACKAGES[first].joinpath(*rest) if first in PACKAGES else None


def main(before: str = "HEAD~1", after: str = "HEAD") -> bool:
    """Compare two revisions; return whether definitions differ."""
    places: list[dict[Definition, list[str]]] = []
    for ref in (before, after):
        found: dict[Definition, list[str]] = defaultdict(list)
        sources = files(ref)
        for path, text in sources.items():
            for definition in definitions(path, text, set(sources)):
                found[definition].append(path)
        places.append(found)
    old, new = places
    moved: Counter[tuple[str, str]] = Counter()
    differ = []
    for definition in {**old, **new}:
        here, there = Counter(old.get(definition, ())), Counter(new.get(definition, ()))
        gone, come = sorted((here - there).elements()), sorted((there - here).elements())
        moved.update(zip(gone, come, strict=False))
        differ += [f"- {path}: {definition[0]}" for path in gone[len(come) :]]
        differ += [f"+ {path}: {definition[0]}" for path in come[len(gone) :]]
    for (source, target), count in sorted(moved.items()):
        print(f"{count:4} from {source} to {target}")
    for line in sorted(differ, key=lambda line: line[2:]):
        print(line)
    print(
        f"{sum(map(len, old.values()))} definitions before, {sum(map(len, new.values()))} after, {len(differ)} differ"
    )
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
