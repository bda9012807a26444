"""tilewise info: what a machine is and has, and which back ends can run."""

import importlib.metadata
import platform
from collections.abc import Sequence
from contextlib import suppress
from json import dumps
from typing import Any

import torch

from .. import __version__
from ..call.backend import ORDER, against
from ..call.check import describe
from ..call.operands import Operands
from ..call.recipe import Recipe
from ..compat.shadow import PACKAGES, who
from ..host.bundle import described
from ..host.tables import source_of_rows
from .parser import Option

OPTIONS = (Option("--json", "Print JSON instead of tables."),)


def info(json: bool) -> str:
    """Show versions, devices, and each back end with its reasons not to run."""
    found = gather()
    if json:
        return dumps(found, indent=1)
    runs = [
        (name, device, f"no: {'; '.join(against)}" if against else "yes")
        for name, by_device in found["backends"].items()
        for device, against in by_device.items()
    ]
    tables = (
        _table("Versions", [*found["versions"].items()]),
        _table("Devices", [(one["device"], one["target"], one["name"]) for one in found["devices"]]),
        _table("Tiles of GPU kernels", [*found["tiles"].items()]),
        _table("Answers imports of", [*found["shadows"].items()]),
        *([_table("Bundles of kernels", [(text,) for text in found["bundles"]])] if found["bundles"] else []),
        _table("Back ends", [("", "on", "runs"), *runs]),
        "tilewise.attention takes the first that can: on {device}, {backend}.".format(**found["default"]),
    )
    return "\n\n".join(tables)


def gather() -> dict[str, Any]:
    """Return all of it as plain values."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    probes = {device: _probe(device) for device in devices}
    default = devices[min(1, len(devices) - 1)]
    chosen = next((name for name in ORDER if not against(name, probes[default])), None)
    return {
        "versions": versions() | {"system": f"{platform.system()} {platform.machine()}"},
        "devices": [{"device": str(d), "target": probes[d].target, "name": device_name(d)} for d in devices],
        "backends": {name: {str(d): against(name, probes[d]) for d in devices} for name in ORDER},
        "shadows": {package: who(package) for package in PACKAGES},
        "bundles": described(),
        "tiles": {str(d): source_of_rows(d) for d in devices},
        "default": {"device": str(default), "backend": chosen},
    }


def _table(title: str, lines: Sequence[Sequence[str]]) -> str:
    """Return lines below a title, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([title, *(f"  {row}".rstrip() for row in rows)])


def _probe(device: torch.device) -> Any:
    """Describe a plain call in fp32, which every device knows."""
    x = torch.zeros(1, 16, 1, 16, device=device)
    return describe(Operands(x, x, x, ()), Recipe(), (0, 0))


def device_name(device: torch.device) -> str:
    """Return the name that its maker gives a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Return the versions of installed packages that matter."""
    found = {"tilewise": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found
