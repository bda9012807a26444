"""tilewise explain: shapes and options in; the kernel, its tiles and every refusal out. Nothing is computed."""

from dataclasses import asdict
from json import dumps
from typing import Any

import torch

from ..attention.explain import explain as explain_call
from ..call.problem import target_of
from .calls import CALL, arguments
from .parser import Option

OPTIONS = (
    *CALL,
    Option("--device", "cpu, sm_90, gfx942, ...; this machine's if left out.", "CHIP"),
    Option("--json", "Print JSON instead of a table."),
)


def explain(device: str | None, json: bool, **call: Any) -> str:
    """Say which back end would run a call, with which tiles, and why each other one would not."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = explain_call(**arguments(call), device=device or target_of(here))
    return dumps(asdict(plan), indent=1) if json else str(plan)
