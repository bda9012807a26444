"""tilewise warm: shapes and options in; the kernels of these calls, compiled, in Triton's cache."""

import shlex
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..score import Bias
from ..warm import Call, Warmed, call_of, warm_calls
from .calls import OPTIONS, arguments, with_call
from .console import err, out, print_json, progress, sentences


@with_call
def warm(
    call: dict[str, Any],
    also: Annotated[
        list[str] | None,
        typer.Option(help='A further call, by the options in which it differs: --also "--q 1,8192,16,64 --sink".'),
    ] = None,
    device: Annotated[str | None, typer.Option(help="sm_90, gfx942, ...; this machine's GPU if left out.")] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Leave out the kernels of gradients.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="How many compile side by side.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compile the kernels of calls ahead of time, into Triton's cache (TRITON_CACHE_DIR)."""
    with sentences():
        calls = [_call(call | other, device, not forward) for other in ({}, *map(_options, also or ()))]
        try:
            warmed = _watched(calls, processes)
        except RuntimeError as error:
            err.print(str(error), markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
    if json:
        print_json(asdict(warmed) | {"kernels": [kernel._asdict() for kernel in warmed.kernels]})
    else:
        out.print(str(warmed), markup=False, soft_wrap=True)


def _options(text: str) -> dict[str, Any]:
    """The options of a call that are in a text, and no others."""
    parser = typer.Typer(add_completion=False)
    parser.command("--also")(with_call(lambda call: None))
    context = typer.main.get_command(parser).make_context("--also", shlex.split(text))
    given = {name for name in OPTIONS if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    return {name: context.params[name] for name in given}


def _call(options: dict[str, Any], device: str | None, backward: bool) -> Call:
    """The call; a bias is learned."""
    made = arguments(**options)
    for score in made["score"]:
        if isinstance(score, Bias):
            score.bias.requires_grad_()
    return call_of(device, backward, **made)


def _watched(calls: list[Call], processes: int | None) -> Warmed:
    """With a bar on the terminal."""
    with progress() as bar:
        task = bar.add_task("looking for kernels", total=None)
        return warm_calls(
            calls,
            processes,
            lambda done, count, name: bar.update(task, completed=done, total=count, description=f"compiled {name}"),
        )
