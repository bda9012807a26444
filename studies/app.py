"""Collect the commands of `python -m studies`."""

import typer

from tilewise.cli.bench import bench

from .accumulation.command import accumulation
from .accuracy.command import accuracy
from .demo.demo import demo
from .training.train import train

app = typer.Typer(
    help="Studies of tilewise, and its own documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (accuracy, accumulation, train, demo, bench):
    app.command()(command)
