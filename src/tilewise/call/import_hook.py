"""Run code right after another module is imported.

FLOP formulas need `torch.utils.flop_counter`. It imports Triton, which few programs need, so we wait for its import.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call then(module) now if the module is imported, else right after its import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    """It finds no module itself: it adds a last step to the loader that the other finders return."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # all others would ask each other, where two watch
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
