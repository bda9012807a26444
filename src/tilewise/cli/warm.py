"""tilewise warm: shapes and options in; the kernels of these calls, compiled, in Triton's cache."""

import os
import shlex
import sys
from argparse import SUPPRESS
from dataclasses import asdict
from json import dumps
from typing import Any

from ..values.score import Bias
from ..warm.save import save as save_bundle
from ..warm.warm import Call, call_of, warm_calls
from .calls import CALL, arguments
from .parser import Option, Parser

OPTIONS = (
    *CALL,
    Option("--also", 'A further call, by what differs in it: --also "--q 1,8192,16,64 --sink".', "OPTIONS", many=True),
    Option("--device", "sm_90, gfx942, ...; this machine's GPU if left out.", "CHIP"),
    Option("--forward", "Leave out the kernels of gradients."),
    Option("--save", "Write the kernels into a bundle, too, and print its SHA-256; see TILEWISE_BUNDLE.", "FILE"),
    Option("--processes", "How many compile side by side.", "N", int, least=1),
    Option("--json", "Print JSON instead of a table."),
)


def warm(
    also: list[str] | None,
    device: str | None,
    forward: bool,
    save: str | None,
    processes: int | None,
    json: bool,
    **call: Any,
) -> str:
    """Compile the kernels of calls ahead of time, into Triton's cache (TRITON_CACHE_DIR)."""
    calls = [_call(call | other, device, not forward) for other in ({}, *map(_options, also or ()))]
    files: dict[str, bytes] | None = None if save is None else {}
    _tell("looking for kernels")
    try:
        warmed = warm_calls(
            calls, processes, lambda done, count, name: _tell(f"kernel {done} of {count}: {name}"), files
        )
    except RuntimeError as error:
        sys.exit(f"tilewise: {error}")
    found = asdict(warmed) | {"kernels": [kernel._asdict() for kernel in warmed.kernels]}
    text = str(warmed)
    if save is not None:
        if not files:
            sys.exit(f"tilewise: {save} is not written, as there is {text}")
        hash = save_bundle(save, files, calls)
        found["bundle"] = {"file": save, "sha256": hash}
        text += f"\n\n{save}: {len(warmed.kernels)} kernels, {os.path.getsize(save)} bytes\nsha256={hash}"
    return dumps(found, indent=1) if json else text


def _options(text: str) -> dict[str, Any]:
    """Read the options of a call that are in a text, and no others."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"also must be options of a call, got {text!r} ({error}); write --sink or the like") from None
    given = [option._replace(default=SUPPRESS) for option in CALL]
    return Parser("warm", None, given, add_help=False).read(words)


def _call(options: dict[str, Any], device: str | None, backward: bool) -> Call:
    """Return the call; a bias is learned."""
    made = arguments(options)
    for score in made["score"]:
        if isinstance(score, Bias):
            score.bias.requires_grad_()
    return call_of(device, backward, **made)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
