"""Options that several studies share."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .bench import results


def check_names(option: str, given: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in given or ():
        if name not in known:
            raise ValueError(f"there is no {option} {name!r}; choose from {', '.join(known)}")


def results_file(folder: Path | None, device: torch.device) -> Path | None:
    """Return the file for results. Refuse one that cannot be merged before the measurement, not after it."""
    if folder is None:
        return None
    file = folder / f"{results.slug(results.device_name(device))}.json"
    results.load(file)
    return file
