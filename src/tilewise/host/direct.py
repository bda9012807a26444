"""Launch a compiled kernel without the wrapper in Python that Triton 3.6 puts around its launcher in C.

In every launch the wrapper describes each tensor to TMA anew, which takes longer than the launch itself. Here a
description is made once for every address at which a kernel finds a tensor.
"""

import inspect
import sys
from typing import Any

from torch import Tensor

BASE = (
    "gridX", "gridY", "gridZ", "stream", "function", "launch_cooperative_grid", "launch_pdl", "global_scratch",
    "profile_scratch", "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook",
)  # fmt: skip
"""What Triton 3.6's launcher in C takes before the kernel's arguments."""
MOST = 4096
"""How many descriptions of a tensor a kernel keeps, of some 400 bytes each."""


class Direct:
    """A kernel's launcher in C, with the arguments that are the same in all launches."""

    def __init__(self, compiled: Any, arguments: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
        run = compiled.run
        self.launch: Any = run.launch
        self.describe: Any = None
        of_maps: dict[int, Any] = {}
        if inspect.isfunction(run.launch):  # the wrapper, which only kernels that take descriptors have
            found = inspect.getclosurevars(run.launch)
            self.launch, self.describe = found.nonlocals["launcher"], found.globals["make_tensordesc_arg"]
            places = sorted(found.nonlocals["tensordesc_indices"])
            of_maps = dict(zip(places, found.nonlocals["tensordesc_meta"], strict=True))
        flags = run.launch_cooperative_grid, run.launch_pdl
        self.base = compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None
        self.rest = rest
        self.tensors = [len(BASE) + n for n, each in enumerate(arguments) if isinstance(each, Tensor)]
        self.maps: list[tuple[int, Any, dict[int, list[Any]]]] = [
            (len(BASE) + n, metadata, {}) for n, metadata in reversed(of_maps.items())
        ]

    def __call__(self, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch on a stream, given by its handle."""
        given = [programs, 1, 1, stream, *self.base, *arguments, *self.rest]
        for n in self.tensors:  # for a tensor, the launcher would ask the driver about its address
            given[n] = given[n].data_ptr()
        for n, metadata, known in self.maps:  # from the last to the first, as a map takes more than one place
            address = given[n].base.data_ptr()
            if address not in known:
                if len(known) == MOST:
                    known.clear()
                known[address] = self.describe(given[n], metadata)
            given[n : n + 1] = known[address]
        self.launch(*given)


def direct(compiled: Any, arguments: tuple[Any, ...], rest: tuple[Any, ...]) -> Direct | None:
    """Return a kernel's launcher in C, or None if the installed Triton has another wrapper, or the kernel scratch."""
    run = compiled.run
    base = getattr(sys.modules[type(run).__module__], "_BASE_ARGS_FORMAT_LEN", None)
    plain = base == len(BASE) and not (run.global_scratch_size or run.profile_scratch_size)
    return Direct(compiled, arguments, rest) if plain else None
