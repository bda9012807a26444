"""python -m tilewise info | explain | warm | shadow | run: plain text, with nothing but torch installed."""

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from . import explain, info, run, shadow, warm
from .parser import PROGRAM, Option, Parser

COMMANDS: dict[str, tuple[Callable[..., str | None], Sequence[Option]]] = {
    "info": (info.info, info.OPTIONS),
    "explain": (explain.explain, explain.OPTIONS),
    "warm": (warm.warm, warm.OPTIONS),
    "shadow": (shadow.shadow, shadow.OPTIONS),
    "run": (run.run, run.OPTIONS),
}
"""Functions that return the text to print, each with the options whose values it takes; `run` takes words."""
MOVED = {
    "bench": "python -m studies bench",
    "demo": "python -m studies demo",
    "study": "python -m studies accuracy or accumulation",
    "train": "python -m studies train",
    "tune": "python -m studies tune",
}
"""Commands that have left the package, by their old names."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, sys.argv's if no words are given; return the exit status."""
    name, *rest = (sys.argv[1:] if words is None else words) or [""]
    if name == "run":
        run.run(rest)
        return 0
    if name in MOVED:
        return _failed(f"`tilewise {name}` is now `{MOVED[name]}`, from a checkout of tilewise")
    if name not in COMMANDS:
        return _without_command(name)
    command, options = COMMANDS[name]
    try:
        text = command(**Parser(name, command.__doc__, options).read(rest))
    except (ValueError, TypeError, OSError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    print(text)
    return 0


def _failed(sentence: str, status: int = 2) -> int:
    """Print a sentence; return the exit status, bad input's by default."""
    print(f"tilewise: {sentence}", file=sys.stderr)
    return status


def _without_command(word: str) -> int:
    """Answer the program's own options, or show its help if there is no word."""
    parser = Parser("", "Exact attention, one tile at a time.", (), usage=f"{PROGRAM} COMMAND [options]")
    version = f"tilewise {__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, (command, _) in COMMANDS.items():
        listed.add_parser(name, help=command.__doc__)
    if word.startswith("-"):
        parser.read([word])
    if word:
        parser.error(f"command must be one of {', '.join(COMMANDS)}, got {word!r}")
    parser.print_help()
    return 2
