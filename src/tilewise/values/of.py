"""Masks and scores that are functions: what `Mask.of` and `Score.of` make."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import run
from .function import MADE, Function
from .masks import Mask
from .score import Score
from .value import ALL, OPEN, Ends, per_batch


@dataclass(frozen=True, eq=False, repr=False)
class MaskOf(Function, Mask):
    """A mask that is a function, made by `Mask.of`, `|` and `~`."""

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        """Return the same of a function of class A (see program.shape) with rows from the last key's, else all keys."""
        found = self.shape.keys
        if found is None or self.against_cache():
            return -OPEN, OPEN
        rows = torch.as_tensor(i)
        count = len(rows) if rows.ndim else 1
        entries = torch.arange(b.start or 0, count if b.stop is None else b.stop, device=rows.device)
        at = {"i": rows, "b": per_batch(entries)}
        lo, hi = run(found, at, self.given, self.numbers)
        return lo, hi

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return the captured tensors, which get no gradients."""
        return tuple([t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in self.given])

    @property
    def shape(self) -> Any:
        """Return the class of the mask and what follows from it (program/shape.py)."""
        from ..program.shape import shape  # on first use, as above

        return shape(self.text)

    @property
    def interval(self) -> bool:  # type: ignore[override]
        return self.shape.name == "A"


@dataclass(frozen=True, eq=False, repr=False)
class ScoreOf(Function, Score):
    """A score that is a function, made by `Score.of`."""

    learns = True

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return not self._reads <= {"s"}

    @property
    def unbounded(self) -> bool:  # type: ignore[override]
        from ..program.bounds import far  # on first use, for a quick import of the package

        return far(self.text)

    def limit(self, numbers: tuple[Any, ...]) -> float | None:  # type: ignore[override]
        from ..program.bounds import limits  # on first use, as above

        found = limits(self.text)
        return found and max(map(abs, found))


MADE |= {kind.__name__: kind for kind in (MaskOf, ScoreOf)}
