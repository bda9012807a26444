"""Cross-compilation: make Triton compile for a chip that is not installed. Nothing can be launched."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class TargetDriver:
    """A Triton driver for a chip that is not installed. It can compile, but not launch."""

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
    """Make Triton compile for a chip such as "sm_90" or "gfx942".

    Call it once per process: Triton keeps kernels by device number, so a second chip would get those of the first.
    """
    chip: Any = TargetDriver(gpu_target(name))
    driver.set_active(chip)


def gpu_target(name: str) -> GPUTarget:
    """Return Triton's description of a chip."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 32 if name.startswith(("gfx10", "gfx11", "gfx12")) else 64)
