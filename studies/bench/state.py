"""State of a kernel: a hash of its device functions, all that they call, and its rows of tiles.

The source is read and never run, so that other revisions' kernels have states, too. Local names are numbered in order;
the hash of a called function stands in place of its name. So docstrings, comments, and names of files, functions and
local variables do not enter, and neither does any file of the host.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tilewise

PACKAGE = Path(tilewise.__file__).parent
CARRIED = "carried.json"
SIZES = (64, 128, 256, 512)
"""Head sizes that have rows of tiles."""
Definition = tuple[Path, str]
"""A file of the package, and what it defines."""
SKIPPED = {"ctx", "type_comment", "type_params", "kind"}
"""Fields of a syntax tree that change nothing, or that only some versions of Python have."""


class Kernel(NamedTuple):
    """What a kernel is made of."""

    roots: tuple[str, ...]
    """"file:function" of each; "file:*_grad" is all of that kind. Files of studies/ are in a checkout only."""
    tables: tuple[str, ...] = ()
    """"file:TABLE" of each of its tables of tiles."""


HOPPER, PORTABLE = "hopper/tiles.py", "triton/tiles.py"
BACKWARD = tuple([f"triton/backward.py:attention_backward_{name}" for name in ("delta", "dkdv", "dq")])
ORDERS = ("tile/schedule.py:assign", "tile/schedule.py:assign_each")
"""What a launch hands over as its order of tiles."""
KERNELS = {
    "split keys": Kernel(
        ("triton/split_keys/kernel.py:attention_decode", "tile/combine.py:attention_combine"),
        ("triton/tiles.py:DECODE",),
    ),
    "hopper split keys": Kernel(("hopper/split_keys/kernel.py:attention_decode", "tile/combine.py:attention_combine")),
    "append": Kernel(("append/kernel.py:cache_append",)),
    "merge": Kernel(("merge/kernel.py:attention_merge",)),
    "quantize": Kernel(
        ("quantize/statistics.py:attention_quantize_statistics", "quantize/kernel.py:attention_quantize"),
    ),
    "hopper forward": Kernel(("hopper/forward/kernel.py:attention_forward", *ORDERS), (f"{HOPPER}:FORWARD",)),
    "hopper 8-bit forward": Kernel(("hopper/forward/kernel.py:attention_forward", *ORDERS), (f"{HOPPER}:EIGHT_BITS",)),
    "hopper backward": Kernel(
        (
            "hopper/backward/kernel.py:attention_backward",
            "hopper/backward/kernel_by_gradient.py:attention_backward_by_gradient",
            "hopper/backward/preprocess.py:attention_backward_preprocess",
            "hopper/backward/postprocess.py:attention_backward_postprocess",
            "hopper/backward/deterministic.py:attention_backward_init_semaphore",
        ),
        (f"{HOPPER}:BACKWARD",),
    ),
    "hopper fp32 forward": Kernel(
        ("hopper/fp32/forward.py:attention_forward_fp32", "hopper/fp32/split.py:attention_split_fp32", *ORDERS),
        (f"{HOPPER}:FP32_FORWARD", f"{HOPPER}:KINDS"),
    ),
    "hopper fp32 backward": Kernel(
        (
            "hopper/fp32/backward.py:attention_backward_fp32",
            "hopper/fp32/preprocess.py:attention_backward_preprocess_fp32",
            "hopper/backward/postprocess.py:attention_backward_postprocess",
            "hopper/fp32/split.py:attention_split_fp32",
            "hopper/backward/deterministic.py:attention_backward_init_semaphore",
        ),
        ("hopper/fp32/backward_launch.py:ROWS", f"{HOPPER}:KINDS"),
    ),
    "triton forward": Kernel(("triton/forward.py:attention_forward",), (f"{PORTABLE}:FORWARD",)),
    "triton backward": Kernel(BACKWARD, (f"{PORTABLE}:DKDV", f"{PORTABLE}:DQ")),
    "triton backward in chunks": Kernel(
        (BACKWARD[0], *(f"triton/chunked/kernel.py:attention_backward_{name}" for name in ("chunk", "chunk_sums"))),
        ("triton/chunked/tiles.py:CHUNKS",),
    ),
    "triton single": Kernel(
        (
            "triton/single/kernel.py:attention_forward_single",
            "triton/single/kernel.py:attention_backward_single",
        ),
        (f"{PORTABLE}:SINGLE",),
    ),
    "triton fp32 forward": Kernel(("triton/forward.py:attention_forward",), (f"{PORTABLE}:FORWARD",)),
    "triton fp32 backward": Kernel(BACKWARD, (f"{PORTABLE}:DKDV", f"{PORTABLE}:DQ")),
    "gradient of a bias": Kernel(("tile/gather.py:attention_backward_gather",), (f"{HOPPER}:BIAS", f"{PORTABLE}:DQ")),
    "triton gradient of a bias": Kernel(("tile/gather.py:attention_backward_gather",), (f"{PORTABLE}:BIAS",)),
    "lists of tiles": Kernel(("tile/ranges.py:attention_list_tiles",)),
    "renormalization": Kernel(("tile/renormalize.py:attention_backward_renormalize",)),
    "gradient of a sink": Kernel(("tile/sink.py:attention_backward_sink",)),
    "rotary": Kernel(("rotary/kernel.py:rotary_embedding",)),
    "fp16 sums": Kernel(("studies/accumulation/forward.py:forward",)),
    "fp16 sums, emulated": Kernel(("studies/accumulation/rounded.py:*",)),
    "ablation": Kernel(("studies/ablation/kernels.py:*",)),
    "cpu": Kernel(("cpu/fused.py:*", "cpu/sequences.py:*", "cpu/tiled.py:*")),
}
"""By name. Those with tables have a state for each head size that has rows: "hopper forward D64"."""
ON_CPU = ("cpu", "fp16 sums, emulated")
"""The others are of GPUs, and those whose names begin with hopper of sm_90 alone."""
EARLIER = {
    "append/kernel.py": "tile/append.py",
    "hopper/backward/deterministic.py": "hopper/turns.py",
    "hopper/backward/kernel.py": "hopper/backward.py",
    "hopper/backward/postprocess.py": "hopper/around.py",
    "hopper/backward/preprocess.py": "hopper/around.py",
    "hopper/backward/scores.py": "hopper/backward_scores.py",
    "hopper/forward/kernel.py": "hopper/forward.py",
    "hopper/fp32/backward.py": "hopper/fp32_gradients.py",
    "hopper/fp32/forward.py": "hopper/fp32_forward.py",
    "hopper/fp32/preprocess.py": "hopper/fp32_around.py",
    "hopper/fp32/split.py": "hopper/pieces.py",
    "hopper/fp32/backward_launch.py": "hopper/fp32_backward_launch.py",
    "hopper/fp32_backward_launch.py": "hopper/fp32_backward.py",
    "hopper/parts/scores.py": "hopper/scores.py",
    "hopper/split_keys/kernel.py": "hopper/forward/decode.py",
    "merge/kernel.py": "tile/merge.py",
    "quantize/kernel.py": "tile/quantize.py",
    "quantize/statistics.py": "tile/quantize.py",
    "rotary/kernel.py": "tile/rotary.py",
    "tile/combine.py": "triton/decode.py",
    "tile/gather.py": "tile/bias.py",
    "tile/ranges.py": "tile/visits.py",
    "triton/split_keys/kernel.py": "triton/decode.py",
    "studies/accumulation/forward.py": "experimental/forward.py",
    "studies/accumulation/rounded.py": "experimental/rounded.py",
    "studies/ablation/kernels.py": "bench/ablation_kernels.py",
}
"""Where a file stood before it moved: there earlier revisions have it."""
RENAMED = {
    "attention_backward": "backward",
    "attention_backward_delta": "delta",
    "attention_backward_dkdv": "dkdv",
    "attention_backward_dq": "dq",
    "attention_backward_fp32": "fp32_backward",
    "attention_backward_gather": "attention_backward_dbias",
    "attention_backward_init_semaphore": "give_turns",
    "attention_backward_postprocess": "finish",
    "attention_backward_preprocess": "prepare",
    "attention_backward_preprocess_fp32": "fp32_prepare",
    "attention_backward_renormalize": "renormalize",
    "attention_forward": "forward",
    "attention_forward_fp32": "fp32_forward",
    "attention_list_tiles": "list_tiles",
    "attention_split_fp32": "split",
    "rotary_embedding": "rotate",
}
"""What a kernel was called before: earlier revisions have it under that name."""
VALUES = {
    "mask": (("tile/masks.py",), ("keep", "keys", "queries")),
    "score": (
        ("tile/scores.py", "hopper/parts/scores.py", "hopper/backward/scores.py"),
        ("fn", "grad", "past_fn", "past_grad"),
    ),
}
"""Device functions of masks and scores that are written by hand: files, and how their names end."""
RULES = {
    "mask": ("values/masks.py", "values/intervals.py", "values/tables.py", "values/by_head.py", "values/listed.py"),
    "score": ("values/score.py",),
}
"""Files of the masks and scores whose device functions are emitted."""
RULE = ("rule", "rule_takes")
"""Methods that they are emitted from."""
EMISSION = (
    "host/emit.py:source",
    "tile/arithmetic.py:*",
    "hopper/parts/scores.py:saturated",
    "hopper/backward/scores.py:STEPS",
)
"""What makes them."""


@lru_cache(64)
def states(package: Path = PACKAGE, chips: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the state of each kernel of a package, by name.

    `chips` are the kinds whose rows of the portable tables are read (see triton/tiles.py). Without any, return the
    kernels of the CPU alone.
    """
    source = Source(package)
    found = {"chips": " ".join(chips)}
    for name, kernel in KERNELS.items():
        if (name in ON_CPU) == bool(chips) or (name.startswith("hopper") and chips != ("hopper",)):
            continue
        roots = [root for pattern in kernel.roots for root in source.matching(pattern)]
        if not roots:
            continue
        code = [source.digest(root) for root in roots]
        if not kernel.tables:
            found[name] = _digest(code)
        for size in SIZES if kernel.tables else ():
            tables = [_rows(source, table, size, name, chips) for table in kernel.tables]
            if tables[0]:
                found[f"{name} D{size}"] = _digest([*code, *map(repr, tables)])
    if chips:
        found |= _values(source)
    return found


def _values(source: "Source") -> dict[str, str]:
    """Return the state of each mask and score: of its rule, or of the device functions written by hand."""
    found = {}
    made = [source.digest(root) for pattern in EMISSION for root in source.matching(pattern)]
    for word, files in RULES.items():
        for path, name in [each for file in files for each in source.matching(f"{file}:*")]:
            body = getattr(source.module(path)[name], "body", ())
            rule = [Text(source, path, node).text for node in body if getattr(node, "name", "") in RULE]
            if rule:
                found[f"{word} {name.lower()}"] = _digest([*rule, *made])
    for word, (files, ends) in VALUES.items():
        first, *_ = files
        for _, name in source.matching(f"{first}:*_{ends[0]}"):
            stem = name.removesuffix(f"_{ends[0]}")
            own = [root for file in files for end in ends for root in source.matching(f"{file}:{stem}_{end}")]
            found[f"{word} {stem}"] = _digest(map(source.digest, own))
    return found


def digest(found: Mapping[str, str]) -> str:
    """Return a hash of all states, which stands for them in a result's environment."""
    return _digest([f"{name} {state}" for name, state in sorted(found.items())])


def carried(results: Path) -> dict[str, str]:
    """Return states that `tools/states.py carry` found to be equal machine code, and their heirs, by folder."""
    file = results / CARRIED
    return {each["old"]: each["new"] for each in json.loads(file.read_text())} if file.exists() else {}


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _rows(source: "Source", table: str, size: int, name: str, chips: tuple[str, ...]) -> list[str]:
    """Return a table's rows of one head size; for portable kernels, of the chip's kinds and type's size."""
    file, _, title = table.partition(":")
    path = source.path(file)
    value = getattr(source.module(path).get(title), "value", None)
    if not isinstance(value, ast.Dict):
        return []
    found = []
    for key, row in zip(value.keys, value.values, strict=True):
        at = ast.literal_eval(key) if key else None
        parts: tuple[Any, ...] = at if isinstance(at, tuple) else (at,)
        of_size = size in parts or not any(isinstance(part, int) for part in parts)
        of_chip = file != PORTABLE or (parts[0] in chips and parts[1] == (4 if "fp32" in name else 2))
        calls = [call for call in (row.elts if isinstance(row, ast.Tuple) else [row]) if isinstance(call, ast.Call)]
        if of_size and of_chip and calls:
            found.append(f"{parts}: {', '.join([Text(source, path, call).fields(call, {'func'}) for call in calls])}")
    return found


class Source:
    """A package's files as syntax trees."""

    def __init__(self, package: Path) -> None:
        self.package, self.root = package, package.parents[1]
        self.modules: dict[Path, dict[str, Any]] = {}
        self.digests: dict[Definition, str] = {}

    def module(self, path: Path) -> dict[str, Any]:
        """Return what a file defines or imports at its top level, by name; nothing if there is no such file."""
        if path not in self.modules:
            tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
            names: dict[str, Any] = {}
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names[node.name] = node
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    names.update({alias.asname or alias.name: (node, alias.name) for alias in node.names})
                else:
                    stored = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
                    names.update({name.id: node for name in stored})
            self.modules[path] = names
        return self.modules[path]

    def path(self, file: str) -> Path:
        """Return the path of a file of the package, now or before it moved."""
        now = before = self.root / file if file.startswith("studies/") else self.package / file
        while not before.is_file() and file in EARLIER:
            file = EARLIER[file]
            before = self.package / file
        return before if before.is_file() else now

    def matching(self, pattern: str) -> list[Definition]:
        """Return the existing definitions of "file:name", where * matches anything."""
        file, _, name = pattern.partition(":")
        path, (start, star, end) = self.path(file), name.partition("*")
        own = [n for n, node in self.module(path).items() if not isinstance(node, tuple)]
        if not star:
            return [(path, n) for n in (name, RENAMED.get(name)) if n in own][:1]
        return [(path, n) for n in sorted(own) if n.startswith(start) and n.endswith(end)]

    def digest(self, of: Definition) -> str:
        """Return the hash of a definition, with all that it reaches."""
        if of not in self.digests:
            self.digests[of] = "itself"  # where it calls itself
            node: Any = self.module(of[0])[of[1]]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                node = node.value
            self.digests[of] = _digest([Text(self, of[0], node).text])
        return self.digests[of]

    def target(self, path: Path, statement: ast.ImportFrom) -> Path | None:
        """Return the module that a file imports, without suffix; None outside the package and the studies."""
        if statement.level:
            folder = path.parents[statement.level - 1]
            return folder.joinpath(*statement.module.split(".")) if statement.module else folder
        first, *rest = (statement.module or "").split(".")
        folders = {self.package.name: self.package, "studies": self.root / "studies"}
        return folders[first].joinpath(*rest) if first in folders else None

    def meaning(self, path: Path, name: str) -> Path | str:
        """Return what a name means in a file: a module of the package (its path), a definition's hash, or the name."""
        node = self.module(path).get(name)
        if node is None:
            return name
        if not isinstance(node, tuple):
            return self.digest((path, name))
        statement, original = node
        if isinstance(statement, ast.Import):
            return original
        target = self.target(path, statement)
        if target is None:
            return f"{statement.module}.{original}"
        for module in (target / f"{original}.py", target / original / "__init__.py"):
            if module.is_file():
                return module
        home = target.with_suffix(".py") if target.with_suffix(".py").is_file() else target / "__init__.py"
        if self.package / "cpu" in path.parents and self.package / "cpu" not in home.parents:
            return original  # the CPU's functions are hosts themselves: what they call elsewhere goes by its name
        found = self.meaning(home, original)
        return original if found == original and original not in self.module(home) else found


class Text:
    """A definition as text, with local names numbered and others by what they stand for."""

    def __init__(self, source: Source, path: Path, node: ast.AST) -> None:
        self.source, self.path, self.node = source, path, node
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        inside = isinstance(node, ast.FunctionDef)
        self.local = stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} if inside else set()
        self.numbers: dict[str, str] = {}

    @cached_property
    def text(self) -> str:
        return self.of(self.node)

    def of(self, node: Any) -> str:
        """Return one node, and those below it, as text."""
        match node:
            case list():
                return f"[{','.join(map(self.of, node))}]"
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute(value=base, attr=attribute):
                return self.attribute(base, attribute)
            case ast.arg(arg=name, annotation=annotation):
                return f"{self.name(name)}:{self.of(annotation)}"
            case ast.FunctionDef() | ast.ClassDef():
                return self.fields(node, {"name", "returns"}, body=_without_docstring(node.body))
            case ast.AST():
                return self.fields(node, set())
            case _:
                return repr(node)

    def fields(self, node: ast.AST, skipped: set[str], **given: Any) -> str:
        """Return a node's kind and fields. Empty ones are left out, as in some versions of Python."""
        fields = {name: given.get(name, value) for name, value in ast.iter_fields(node)}
        kept = {name: value for name, value in fields.items() if name not in SKIPPED | skipped}
        shown = (f"{name}={self.of(value)}" for name, value in kept.items() if value is not None and value != [])
        return f"{type(node).__name__}({','.join(shown)})"

    def name(self, name: str) -> str:
        if name in self.local:
            return self.numbers.setdefault(name, f"local {len(self.numbers)}")
        found = self.source.meaning(self.path, name)
        return "a module" if isinstance(found, Path) else found

    def attribute(self, base: ast.AST, attribute: str) -> str:
        """Return the definition of a package module's attribute; the name of any other."""
        if isinstance(base, ast.Name) and base.id not in self.local:
            found = self.source.meaning(self.path, base.id)
            if isinstance(found, Path):
                return self.source.digest((found, attribute)) if attribute in self.source.module(found) else attribute
        return f"{self.of(base)}.{attribute}"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
