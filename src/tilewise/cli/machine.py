"""What a machine is and has: its device, and the versions of packages that matter."""

import importlib.metadata
import platform
from contextlib import suppress

import torch

from .. import __version__


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
    found = {"tilewise": __version__, "python": platform.python_version()}
    found["torch"] = torch.__version__
    for package in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or ""
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found
