"""Run `python -m tilewise` in this process."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

from tilewise.cli import main


class Ended(NamedTuple):
    """What a command left: its exit status, and what it printed."""

    status: int
    stdout: str
    stderr: str


def call(*words: str) -> Ended:
    """Run a command as the console script does."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
            if isinstance(status, str):  # as Python ends with a text
                print(status, file=err)
                status = 1
    return Ended(status, out.getvalue(), err.getvalue())
