"""Options that several studies share."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .bench import results


def pick_device(name: str | None) -> torch.device:
    """Return the device asked for, or a GPU if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}; leave it out for a GPU if there is one")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that PyTorch sees, got cuda without a GPU; leave --device out")
    return torch.device(name)


def check_names(option: str, given: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in given or ():
        if name not in known:
            raise ValueError(f"there is no {option} {name!r}; choose from {', '.join(known)}")


def results_file(folder: Path | None, device: torch.device) -> Path | None:
    """Return the file for results. Refuse one that cannot be merged before the measurement, not after it."""
    if folder is None:
        return None
    file = results.file_of(folder, results.device_name(device))
    results.load(file)
    return file
