"""Collect the commands of `python -m studies`."""

import typer

from .accumulation.command import accumulation
from .accuracy.command import accuracy
from .bench.command import bench
from .demo.demo import demo
from .eight_bits.command import eight_bits
from .training.train import train
from .tune.command import tune

app = typer.Typer(
    help="Studies of tilewise, and its own documents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (accuracy, accumulation, train, demo, bench, tune):
    app.command()(command)
app.command("eight_bits")(eight_bits)
