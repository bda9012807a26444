"""Where a study's text goes, by rich: results to standard output, progress and errors to standard error."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(content: Any) -> None:
    """Print plain JSON on standard output, for another program."""
    typer.echo(json.dumps(content, indent=1))


def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], numbers_from: int = 1) -> None:
    """Print a table; columns from `numbers_from` on are aligned right."""
    out.print(f"[bold]{title}[/]", soft_wrap=True)
    drawn = Table(show_header=any(columns), header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        number = index >= numbers_from
        drawn.add_column(column, justify="right" if number else "left", min_width=8 if number else 14, overflow="fold")
    for line in lines:
        drawn.add_row(*line)
    out.print(drawn)
    out.print()


def progress(*extra: str) -> Progress:
    """Make a progress bar on standard error; `extra` are further fields of a task to show."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *(TextColumn(f"{{task.fields[{name}]}}") for name in extra),
        console=err,
    )


@contextmanager
def sentences(*more: type[Exception]) -> Iterator[None]:
    """End with a sentence and exit status 2, without a traceback, on bad input; `more` are further errors to show."""
    try:
        yield
    except (ValueError, TypeError, OSError, *more) as error:
        raise typer.BadParameter(str(error)) from None
