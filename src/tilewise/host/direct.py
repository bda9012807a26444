"""Launch a compiled kernel without the wrapper in Python that Triton 3.6 puts around its launcher in C.

In every launch the wrapper describes each tensor to TMA anew, which takes longer than the launch itself. Here a
description is made once for every address at which a kernel finds a tensor.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor

BASE = (
    "gridX", "gridY", "gridZ", "stream", "function", "launch_cooperative_grid", "launch_pdl", "global_scratch",
    "profile_scratch", "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip
"""What Triton 3.6's launcher in C takes before the kernel's arguments."""
MOST = 4096
"""How many descriptions of a tensor a kernel keeps, of some 400 bytes each."""


class Map(dict[int, list[Any]]):
    """What the launcher in C takes for one of a kernel's descriptors, by the tensor's address.

    All else of it is the same in all launches (see `Launch.compiled`).
    """

    def __init__(self, describe: Any, metadata: Any, descriptor: Any) -> None:
        super().__init__()
        self.describe, self.metadata = describe, metadata
        self.rest = {name: getattr(descriptor, name) for name in ("shape", "strides", "padding")}

    def __missing__(self, address: int) -> list[Any]:
        """Describe a tensor, and keep that."""
        if len(self) >= MOST:
            self.clear()
        found = self[address] = self.describe(SimpleNamespace(base=Address(address), **self.rest), self.metadata)
        return found


class Address(int):
    """An address, as Triton asks a tensor for it."""

    def data_ptr(self) -> int:
        return self


class Direct:
    """A kernel's launcher in C, with the arguments that are the same in all launches."""

    def __init__(self, compiled: Any, arguments: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        run = compiled.run
        self.launch: Any = run.launch
        self.maps: dict[int, Map] = {}
        """By the place among the kernel's arguments."""
        if inspect.isfunction(run.launch):  # the wrapper, which only kernels that take descriptors have
            found = inspect.getclosurevars(run.launch)
            self.launch, describe = found.nonlocals["launcher"], found.globals["make_tensordesc_arg"]
            places = sorted(found.nonlocals["tensordesc_indices"])
            for n, metadata in zip(places, found.nonlocals["tensordesc_meta"], strict=True):
                self.maps[n] = Map(describe, metadata, arguments[n])
        flags = run.launch_cooperative_grid, run.launch_pdl
        self.base = compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None
        self.rest = rest
        self.signature = [*compiled.src.signature.values()] if hasattr(compiled, "src") else None
        """Types of all arguments, by Triton's names; None where they are unknown."""
        self.tensors = [n for n, each in enumerate(arguments) if isinstance(each, Tensor)]

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch on a stream, given by its handle."""
        given = [*arguments]
        for n in self.tensors:  # for a tensor, the launcher would ask the driver about its address
            given[n] = given[n].data_ptr()
        for n, known in reversed(self.maps.items()):  # from the last to the first, as a map takes more than one place
            given[n : n + 1] = known[given[n].base.data_ptr()]
        self.launch(programs, 1, 1, stream, *self.base, *given, *self.rest)


def direct(compiled: Any, arguments: tuple[Any, ...], rest: tuple[Any, ...]) -> Direct | None:
    """Return a kernel's launcher in C, or None if the installed Triton has another wrapper, or the kernel scratch."""
    run = compiled.run
    base = getattr(sys.modules[type(run).__module__], "_BASE_ARGS_FORMAT_LEN", None)
    plain = base == len(BASE) and not (run.global_scratch_size or run.profile_scratch_size)
    return Direct(compiled, arguments, rest) if plain else None
