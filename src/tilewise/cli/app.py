"""The commands, gathered."""

import typer

from . import explain, info, run, shadow, warm
from .moved import MOVED, moved

ANY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that takes whatever it is given."""
app = typer.Typer(
    help="Exact attention, one tile at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (info.info, explain.explain, warm.warm, shadow.shadow):
    app.command()(command)
for name in MOVED:
    app.command(name, hidden=True, context_settings=ANY)(moved(name))


@app.command("run", help=run.DESCRIPTION, context_settings=ANY)
def _run(context: typer.Context) -> None:
    run.run(context.args)
