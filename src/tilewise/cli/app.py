"""The commands, gathered."""

from collections.abc import Callable

import typer

from . import explain, info, run, shadow, warm
from .console import err

MOVED = {
    "bench": "python -m studies bench",
    "demo": "python -m studies demo",
    "study": "python -m studies accuracy or accumulation",
    "train": "python -m studies train",
    "tune": "python -m studies tune",
}
"""Commands that have left the package, by their old names."""
ANY = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that takes whatever it is given."""
app = typer.Typer(
    help="Exact attention, one tile at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def moved(name: str) -> Callable[[typer.Context], None]:
    """Make a command that names the new one, and fails."""

    def tell(context: typer.Context) -> None:
        err.print(f"`tilewise {name}` is now `{MOVED[name]}`, from a checkout of tilewise", soft_wrap=True)
        raise typer.Exit(2)

    return tell


for command in (info.info, explain.explain, warm.warm, shadow.shadow):
    app.command()(command)
for name in MOVED:
    app.command(name, hidden=True, context_settings=ANY)(moved(name))


@app.command("run", help=run.DESCRIPTION, context_settings=ANY)
def _run(context: typer.Context) -> None:
    run.run(context.args)
