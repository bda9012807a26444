"""Commands that have left the package: each says where it is now."""

from collections.abc import Callable

import typer

from .console import err

MOVED = {
    "demo": "python -m studies demo",
    "study": "python -m studies accuracy or accumulation",
    "train": "python -m studies train",
}
"""By their old names."""


def moved(name: str) -> Callable[[typer.Context], None]:
    """A command that tells the new one, and fails."""

    def tell(context: typer.Context) -> None:
        err.print(f"`tilewise {name}` is now `{MOVED[name]}`, from a checkout of tilewise", soft_wrap=True)
        raise typer.Exit(2)

    return tell
