"""tilewise info: what is here, and which back ends can run."""

import platform
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

import tilewise as tw

from ..backend import ORDER, load
from ..bench.results import device_name, versions
from ..describe import describe
from ..host.tables import whose
from ..problem import Operands, Recipe
from .console import out, print_json, sentences, table


def info(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Versions, devices, and each back end with what stands against it."""
    with sentences():
        found = gather()
    if json:
        print_json(found)
        return
    table("Versions", ("", ""), list(found["versions"].items()), numbers_from=2)
    table("Devices", ("", "", ""), [(d["device"], d["target"], escape(d["name"])) for d in found["devices"]], 3)
    table("Tiles of GPU kernels", ("", ""), [(device, escape(rows)) for device, rows in found["tiles"].items()], 2)
    lines = []
    for name, by_device in found["backends"].items():
        for device, against in by_device.items():
            verdict = f"[yellow]no[/]: {escape('; '.join(against))}" if against else "[green]yes[/]"
            lines.append((name, device, verdict))
    table("Back ends", ("", "on", "runs"), lines, 3)
    out.print(f"tilewise.attention takes the first that can: on {found['default']['device']}, ", end="")
    out.print(f"[bold]{found['default']['backend']}[/].")


def gather() -> dict[str, Any]:
    """All of it, as plain values."""
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    probes = {device: _probe(device) for device in devices}
    default = devices[min(1, len(devices) - 1)]
    chosen = next((name for name in ORDER if not load(name).why_not(probes[default])), None)
    return {
        "versions": versions() | {"system": f"{platform.system()} {platform.machine()}"},
        "devices": [{"device": str(d), "target": probes[d].target, "name": device_name(d)} for d in devices],
        "backends": {name: {str(d): load(name).why_not(probes[d]) for d in devices} for name in ORDER},
        "tiles": {str(d): whose(d) for d in devices},
        "default": {"device": str(default), "backend": chosen},
    }


def _probe(device: torch.device) -> Any:
    """A plain call in fp32, which every device knows."""
    x = torch.zeros(1, 16, 1, 16, device=device)
    return describe(Operands(x, x, x, ()), Recipe(), (0, 0))


def backend_in_words(device: torch.device) -> str:
    """The back end that plain calls on this device get, and its tiles."""
    q = torch.zeros(1, 1024, 4, 32, device=device)
    plan = tw.explain(q, q, q, mask=tw.Causal())
    return f"{plan.backend}: {plan.tiles}"
