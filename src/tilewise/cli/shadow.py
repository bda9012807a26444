"""tilewise shadow: a small wheel under another package's name, for code that imports it."""

import sys
from pathlib import Path

from ..compat.shadow import write_wheel
from .parser import Option

OPTIONS = (
    Option("folder", "Where to write; it is made if it is not there.", "FOLDER"),
    Option("--package", "flash_attn, flash_attn_interface (3), flash_attn.cute (4); repeatable.", "NAME", many=True),
    Option("--force", "Write it even where the real package is installed."),
)


def shadow(folder: str, package: list[str] | None, force: bool) -> str:
    """Write a wheel that answers imports of flash_attn with tilewise, for `pip install` on this machine."""
    try:
        paths = [str(write_wheel(name, Path(folder), force)) for name in package or ["flash_attn"]]
    except RuntimeError as error:  # the real package is installed
        raise ValueError(str(error)) from None
    print("pip install --no-deps", *paths, file=sys.stderr)
    return "\n".join(paths)
