"""tilewise run: a script or module as Python itself runs it, on tilewise."""

import atexit
import builtins
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader
from types import ModuleType
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
    _count_until_the_end()
    _run_as_main(given["target"], given["m"], words[target + 1 :])


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


def _run_as_main(target: str, module: bool, arguments: Sequence[str]) -> None:
    """Run a script or module as Python does: as __main__, with sys.argv and sys.path of its own."""
    packed = not module and (os.path.isdir(target) or is_zipfile(target))
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        folder = os.path.abspath(target) if packed else os.path.dirname(os.path.realpath(target))
        sys.path[0] = os.getcwd() if module else folder
    sys.argv[:] = ["-m" if module else target, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if module or packed:
        runpy._run_module_as_main(target if module else "__main__", alter_argv=module)  # type: ignore[attr-defined]
        return
    path = os.path.join(os.getcwd(), target)
    loader = SourceFileLoader("__main__", path)
    try:
        code = loader.source_to_code(loader.get_data(path), path)
    except OSError as error:
        print(f"tilewise run: {error}", file=sys.stderr)
        sys.exit(2)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    exec(code, main.__dict__)
