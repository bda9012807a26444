"""tilewise info: what is here, and which back ends can run."""

import platform
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from ..backend import ORDER, load
from ..check import describe
from ..compat.shadow import PACKAGES, who
from ..host.tables import source_of_rows
from ..problem import Operands, Recipe
from .console import out, print_json, sentences, table
from .machine import device_name, versions


def info(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show versions, devices, and each back end with its reasons not to run."""
    with sentences():
        found = gather()
    if json:
        print_json(found)
        return
    table("Versions", ("", ""), list(found["versions"].items()), numbers_from=2)
    table("Devices", ("", "", ""), [(d["device"], d["target"], escape(d["name"])) for d in found["devices"]], 3)
    table("Tiles of GPU kernels", ("", ""), [(device, escape(rows)) for device, rows in found["tiles"].items()], 2)
    table("Answers imports of", ("", ""), list(found["shadows"].items()), 2)
    lines = []
    for name, by_device in found["backends"].items():
        for device, against in by_device.items():
            verdict = f"[yellow]no[/]: {escape('; '.join(against))}" if against else "[green]yes[/]"
            lines.append((name, device, verdict))
    table("Back ends", ("", "on", "runs"), lines, 3)
    out.print(f"tilewise.attention takes the first that can: on {found['default']['device']}, ", end="")
    out.print(f"[bold]{found['default']['backend']}[/].")


def gather() -> dict[str, Any]:
    """Return all of it as plain values."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    probes = {device: _probe(device) for device in devices}
    default = devices[min(1, len(devices) - 1)]
    chosen = next((name for name in ORDER if not load(name).why_not(probes[default])), None)
    return {
        "versions": versions() | {"system": f"{platform.system()} {platform.machine()}"},
        "devices": [{"device": str(d), "target": probes[d].target, "name": device_name(d)} for d in devices],
        "backends": {name: {str(d): load(name).why_not(probes[d]) for d in devices} for name in ORDER},
        "shadows": {package: who(package) for package in PACKAGES},
        "tiles": {str(d): source_of_rows(d) for d in devices},
        "default": {"device": str(default), "backend": chosen},
    }


def _probe(device: torch.device) -> Any:
    """Describe a plain call in fp32, which every device knows."""
    x = torch.zeros(1, 16, 1, 16, device=device)
    return describe(Operands(x, x, x, ()), Recipe(), (0, 0))
