"""tilewise explain: shapes and options in; the kernel, its tiles and every refusal out. Nothing is computed."""

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from ..explain import explain as explain_call
from ..problem import target_of
from .calls import arguments, with_call
from .console import out, print_json, sentences


@with_call
def explain(
    call: dict[str, Any],
    device: Annotated[str | None, typer.Option(help="cpu, sm_90, gfx942, ...; this machine's if left out.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say which back end would run a call, with which tiles, and why each other one would not."""
    with sentences():
        plan = explain_call(**arguments(**call), device=device or _here())
    if json:
        print_json(asdict(plan))
    else:
        out.print(str(plan), markup=False, soft_wrap=True)


def _here() -> str:
    """Return the chip of this machine."""
    return target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
