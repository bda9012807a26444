"""tilewise run: a script or module as Python itself runs it, on tilewise."""

import atexit
import builtins
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from zipfile import is_zipfile

from .parser import PROGRAM, Option, Parser

USAGE = f"{PROGRAM} run [--sdpa] [--hf] [--flash-attn] (script.py | -m module) [arguments]"


def _sdpa() -> None:
    from ..compat import sdpa

    sdpa.COUNTED.update(sdpa.KEYS)
    sdpa.install()


def _hf() -> None:
    from ..compat import transformers

    transformers.install()


def _flash_attn() -> None:
    from ..compat import install

    install("flash_attn", "flash_attn_interface", "flash_attn.cute")


INSTALLS: dict[str, tuple[str, Callable[[], None]]] = {
    "flash_attn": ("Answer imports of flash_attn with tilewise.", _flash_attn),
    "sdpa": ("Run torch's scaled_dot_product_attention on tilewise.", _sdpa),
    "hf": ('Register attn_implementation="tilewise" with transformers.', _hf),
}
"""What an option does, and how, in this order: transformers looks for flash_attn when it is imported."""
OPTIONS = (
    *(Option(f"--{name.replace('_', '-')}", what) for name, (what, _) in INSTALLS.items()),
    Option("-m", "Run a module, as python -m does."),
    Option("target", "A script, a folder or archive with __main__.py, or a module; then its own arguments.", "TARGET"),
)


def run(words: Sequence[str]) -> None:
    """Run an unchanged script on tilewise; at its end, one line on standard error says what ran where."""
    parser = Parser("run", run.__doc__, OPTIONS, usage=USAGE)
    target = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    given = parser.read(words[: target + 1])  # argparse would drop a script's own --
    for name, (_, install) in INSTALLS.items():
        if given[name]:
            try:
                install()
            except (ImportError, RuntimeError) as error:
                parser.exit(2, f"tilewise run: {error}\n")
    main, code = _load(given["target"], given["m"], words[target + 1 :])
    _count_until_the_end()
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _count_until_the_end() -> None:
    """Count calls from now on, and print a line when this process ends, not those forked from it."""
    from ..call.count import count_calls

    counting = ExitStack()
    calls, process, rank = counting.enter_context(count_calls()), os.getpid(), os.environ.get("RANK")

    def tell() -> None:
        if os.getpid() == process:
            print(f"tilewise{f' (rank {rank})' if rank else ''}: {calls}", file=sys.stderr, flush=True)
        counting.close()

    atexit.register(tell)


def _load(target: str, module: bool, arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """Return a script or module as __main__, and its code; set sys.argv and sys.path as Python sets them."""
    packed = not module and (os.path.isdir(target) or is_zipfile(target))
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        folder = os.path.abspath(target) if packed else os.path.dirname(os.path.realpath(target))
        sys.path[0] = os.getcwd() if module else folder
    main, spec = ModuleType("__main__"), None
    if module or packed:
        spec = _spec_of_module(target) if module else PathFinder.find_spec("__main__", [os.path.abspath(target)])
        if spec is None or spec.loader is None:
            sys.exit(f"tilewise run: no module named {target if module else '__main__ in ' + target}")
        path, loader = spec.origin, spec.loader
        code = loader.get_code(spec.name)  # type: ignore[attr-defined]
    else:
        path = os.path.join(os.getcwd(), target)
        loader = SourceFileLoader("__main__", path)
        try:
            code = loader.source_to_code(loader.get_data(path), path)
        except OSError as error:
            print(f"tilewise run: {error}", file=sys.stderr)
            sys.exit(2)
    main.__spec__, main.__package__ = spec, spec and spec.parent
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=spec and spec.cached)
    sys.argv[:] = [path if module else target, *arguments]  # type: ignore[list-item]
    return main, code


def _spec_of_module(name: str) -> ModuleSpec | None:
    """Return what python -m would run: the module, or a package's __main__; None if there is none."""
    try:
        spec = find_spec(name)
        return _spec_of_module(f"{name}.__main__") if spec and spec.submodule_search_locations is not None else spec
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # a module that it imports
            raise
        return None
