"""python -m tilewise info | explain | run | shadow | warm. All but run need the extra `cli`."""

import importlib.util
import sys

NEEDED = ("typer", "rich")


def main() -> int:
    """Run the command line; return the exit status."""
    if sys.argv[1:2] == ["run"]:
        from .run import run

        run(sys.argv[2:])
        return 0
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The command line needs {' and '.join(missing)}: pip install 'tilewise[cli]'", file=sys.stderr)
        return 1
    from .app import app

    app(prog_name="tilewise")
    return 0
