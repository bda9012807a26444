"""The commands, gathered."""

import typer

from . import bench, demo, explain, info, study, train, tune, warm

app = typer.Typer(
    help="Exact attention, one tile at a time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (info.info, explain.explain, warm.warm, bench.bench, tune.tune, train.train, demo.demo):
    app.command()(command)
app.add_typer(study.study, name="study")
