"""Triton for a chip that is not here: kernels compile, nothing can be launched."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Elsewhere:
    """Enough of a driver to compile for a chip that is not here; nothing can be launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def is_active(self) -> bool:
        return True


def use_target(name: str) -> None:
    """Makes Triton compile for a chip such as "sm_90" or "gfx942": once per process, as kernels are kept by device."""
    chip: Any = Elsewhere(gpu_target(name))
    driver.set_active(chip)


def gpu_target(name: str) -> GPUTarget:
    """A chip as Triton names it."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)
