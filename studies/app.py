"""The commands of `python -m studies`, gathered."""

import typer

from tilewise.cli.bench import bench

from . import ablation  # noqa: F401, adds its suite and its peers before `bench` lists them

app = typer.Typer(
    help="Studies of tilewise, and its own documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(bench)
