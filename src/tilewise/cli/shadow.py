"""tilewise shadow: a small wheel under another package's name, for code that imports it."""

from pathlib import Path
from typing import Annotated

import typer

from ..compat.shadow import write_wheel
from .console import err, out, sentences


def shadow(
    folder: Annotated[Path, typer.Argument(help="Where to write; it is made if it is not there.")],
    package: Annotated[
        list[str] | None,
        typer.Option(help="flash_attn, flash_attn_interface (version 3) or flash_attn.cute (4); more than once."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write it even where the real package is installed.")] = False,
) -> None:
    """Write a wheel that answers imports of flash_attn with tilewise, for `pip install` on this machine."""
    with sentences(RuntimeError):
        paths = [write_wheel(name, folder, force) for name in package or ["flash_attn"]]
    for path in paths:
        out.print(str(path), soft_wrap=True)
    err.print("pip install --no-deps " + " ".join(map(str, paths)), soft_wrap=True)
