"""How code that imports flash_attn finds tilewise: a finder in this process, or a small wheel with the same modules.

Both are made from one table, PACKAGES. Both have a version, metadata and submodules, because clients look for those
before they import; and a name that tilewise lacks is missing, with an error that says so.
"""

import base64
import hashlib
import importlib
import re
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple


class Package(NamedTuple):
    """A distribution: its name, the version that it answers for, and which of our modules each of its modules is."""

    distribution: str
    version: str
    modules: dict[str, str]

    def texts(self) -> dict[str, str]:
        """Return the files of its metadata."""
        top = sorted({name.partition(".")[0] for name in self.modules})
        return {"METADATA": METADATA.format(*self), "top_level.txt": "".join(f"{name}\n" for name in top)}


METADATA = """\
Metadata-Version: 2.1
Name: {0}
Version: {1}
Summary: tilewise under the name {0}, for code that imports it; not the original
Classifier: Private :: Do Not Upload
Requires-Dist: tilewise
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: tilewise\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
MODULE = '"""{0}, from tilewise."""\n\nfrom tilewise.compat.shadow import fill\n\nfill(__name__)\n'
EMPTY = ""
"""The module of ours behind one that only holds others."""

PACKAGES = {
    "flash_attn": Package(
        "flash-attn",
        "2.8.3",
        {
            "flash_attn": "flash_attn",
            "flash_attn.bert_padding": "flash_attn.bert_padding",
            "flash_attn.flash_attn_interface": "flash_attn.flash_attn_interface",
            "flash_attn.layers": EMPTY,
            "flash_attn.layers.rotary": "flash_attn.layers.rotary",
            "flash_attn.modules": EMPTY,
            "flash_attn.modules.mha": "flash_attn.modules.mha",
            "flash_attn.ops": EMPTY,
            "flash_attn.ops.triton": EMPTY,
            "flash_attn.ops.triton.rotary": "flash_attn.layers.rotary",
            "flash_attn_2_cuda": "flash_attn.flash_attn_gpu",
        },
    ),
    "flash_attn.cute": Package(
        "flash-attn-4",
        "4.0.0",
        {"flash_attn.cute": "flash_attn.cute", "flash_attn.cute.interface": "flash_attn.cute"},
    ),
    "flash_attn_interface": Package(
        "flash-attn-3",
        "3.0.0",
        {
            "flash_attn_interface": "flash_attn_interface",
            "flash_attn_3": EMPTY,
            "flash_attn_3.flash_attn_interface": "flash_attn_interface",
        },
    ),
}
"""By the name that clients import."""
MODULES = {name: package for package in PACKAGES.values() for name in package.modules}


def install(*packages: str, force: bool = False) -> None:
    """Answer imports of other packages in this process: `install("flash_attn")`, before anything looks for them.

    Call it before you import transformers and its like, which look once. Each process needs it, workers too. A second
    call for a package changes nothing, and so does one where the wheel of `python -m tilewise shadow` is installed.

    `packages` are one or several of "flash_attn" (version 2), "flash_attn_interface" (3) and "flash_attn.cute" (4).
    Raises ValueError for others, and RuntimeError if the real package is imported already, or is installed and `force`
    is false.
    """
    wanted = [name for name in _known(packages) if name not in _FINDER.names and not is_shadow(name)]
    for name in wanted:
        refuse_real(name, force)
        if loaded := [module for module in PACKAGES[name].modules if module in sys.modules]:
            raise RuntimeError(f"{loaded[0]} is imported already; call install before anything imports it")
    _FINDER.names += wanted
    if _FINDER.names and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    importlib.invalidate_caches()


def uninstall(*packages: str) -> None:
    """Undo `install` for these packages, or for all: their modules leave sys.modules. What is imported keeps working.
    Raises ValueError as `install`.
    """
    for package in _known(packages or tuple(PACKAGES)):
        if package not in _FINDER.names:
            continue
        _FINDER.names.remove(package)
        for name in PACKAGES[package].modules:
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(last, None)
            sys.modules.pop(name, None)
    if not _FINDER.names and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for parent in _FINDER.parents - {name.rpartition(".")[0] for name in _FINDER.names}:
        _FINDER.parents.remove(parent)
        sys.modules.pop(parent, None)
    importlib.invalidate_caches()


def write_wheel(package: str, folder: Path, force: bool = False) -> Path:
    """Write a wheel with a package's modules, which need tilewise where it is installed; return its path.
    Raises ValueError and RuntimeError as `install`.
    """
    (name,) = _known((package,))
    refuse_real(name, force)
    it = PACKAGES[name]
    stem = f"{it.distribution.replace('-', '_')}-{it.version}"
    files = {_path(module): MODULE.format(module) for module in it.modules}
    files |= {f"{stem}.dist-info/{file}": text for file, text in {**it.texts(), "WHEEL": WHEEL}.items()}
    record = f"{stem}.dist-info/RECORD"
    files[record] = "".join([f"{file},{_digest(text)},{len(text)}\n" for file, text in files.items()]) + f"{record},,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with TemporaryDirectory(dir=folder) as fresh:  # what a link of the wheel's name points to stays as it is
        made = Path(fresh, path.name)
        with zipfile.ZipFile(made, "w") as wheel:
            for file, text in files.items():
                wheel.writestr(zipfile.ZipInfo(file), text, zipfile.ZIP_DEFLATED)
        made.replace(path)
    return path


def fill(name: str) -> None:
    """Give a module of PACKAGES, which is in sys.modules, the names and submodules that it has."""
    module, package = sys.modules[name], MODULES[name]
    source = package.modules[name]
    ours = importlib.import_module(f"{__package__}.{source}") if source else ModuleType(name)
    public = getattr(ours, "__all__", [])
    vars(module).update({key: getattr(ours, key) for key in public})
    vars(module).update(__all__=list(public), __doc__=ours.__doc__, __tilewise__=True)
    if name in PACKAGES:
        vars(module)["__version__"] = package.version

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"{name} is tilewise's, which has no {attribute}; install the original {package.distribution} for that"
        )

    vars(module)["__getattr__"] = missing
    for child in package.modules:
        if child.rpartition(".")[0] == name:
            importlib.import_module(child)


def who(package: str) -> str:
    """Tell in words who answers imports of a package: tilewise, the original or nobody."""
    if package in _FINDER.names:
        return "tilewise, in this process"
    if is_shadow(package):
        return "tilewise, by its wheel"
    return "nobody" if _elsewhere(package) is None else "the original"


def is_shadow(package: str) -> bool:
    """Tell whether the wheel that `write_wheel` makes is installed."""
    try:
        return "tilewise" in (metadata.requires(PACKAGES[package].distribution) or ())
    except metadata.PackageNotFoundError:
        return False


def refuse_real(package: str, force: bool) -> None:
    """Raise RuntimeError if a package other than ours is installed, unless force is true."""
    spec = None if force or is_shadow(package) else _elsewhere(package)
    if spec is not None:
        where = spec.origin or "a folder"
        raise RuntimeError(f"{package} is installed, at {where}; remove it, or pass force=True (--force)")


def _known(packages: tuple[str, ...]) -> tuple[str, ...]:
    if not packages or not set(packages) <= PACKAGES.keys():
        names, got = ", ".join(PACKAGES), ", ".join(map(repr, packages)) or "none"
        raise ValueError(f"packages must be some of {names}, got {got}; name at least one of these")
    return tuple(dict.fromkeys(packages))


def _elsewhere(name: str) -> ModuleSpec | None:
    """Find a module without importing anything, as if we had no finder."""
    spec, path = None, None
    for end in [match.start() for match in re.finditer(r"\.|$", name)]:
        others = (finder.find_spec(name[:end], path) for finder in sys.meta_path if finder is not _FINDER)
        spec = next(filter(None, others), None)
        path = None if spec is None else spec.submodule_search_locations
        if spec is None or (path is None and end < len(name)):
            return None
    return spec


def _is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in MODULES)


def _path(module: str) -> str:
    return module.replace(".", "/") + ("/__init__.py" if _is_package(module) else ".py")


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


class _Finder(MetaPathFinder, Loader):
    """It finds the modules and the metadata of the packages in `names`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.parents: set[str] = set()
        """Packages that only hold ours: flash_attn, where there is flash_attn.cute alone."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if any(fullname in PACKAGES[name].modules for name in self.names):
            return ModuleSpec(fullname, self, origin="tilewise", is_package=_is_package(fullname))
        if any(name.startswith(f"{fullname}.") for name in self.names) and _elsewhere(fullname) is None:
            self.parents.add(fullname)
            return ModuleSpec(fullname, None, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        fill(module.__name__)

    def find_distributions(self, context: Any = None) -> Iterator["_Distribution"]:
        """Yield the distributions asked for: those of one name, or all."""
        wanted = getattr(context, "name", None)
        wanted = wanted and re.sub(r"[-_.]+", "-", wanted).lower()
        for name, package in PACKAGES.items():  # version 2 first: clients that see several take the first
            if name in self.names and wanted in (None, package.distribution):
                yield _Distribution(package)


class _Distribution(metadata.Distribution):
    """The metadata of a package that is not installed."""

    def __init__(self, package: Package) -> None:
        self.package = package

    def read_text(self, filename: Any) -> str | None:
        return self.package.texts().get(str(filename))

    def locate_file(self, path: Any) -> Path:  # type: ignore[override]
        return Path(__file__).parent / path


_FINDER = _Finder()
