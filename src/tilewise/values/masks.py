"""Attention masks: which keys each query sees. Combine them with `&`, `|` and `~`.

A mask is its `rule`, a plain function of b, h, i and j, from which `keep` follows, for the reference and the CPU, and
what kernels take (host/emit.py). `align` says what i counts from: in most masks, the last row's i is the last key's j.
`captures` and `shapes` describe the tensors that it reads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..program import Aligned, Entries, join, keep
from .function import MADE, Ruled, as_value
from .value import ALL, OPEN, Ends


class Mask(Ruled):
    """Every mask derives from this class, and `Mask.of` makes one of a function.

    `mask & other` shows the keys that both show, `mask | other` those that one of them shows, and `~mask` the others.
    One of two masks may be a plain function.
    """

    what = "mask"
    align = "last"
    tile_lists: tuple[Any, ...] = ()
    """TileLists of its tiles, which `tilewise.listed` has made."""
    held: Any = None
    """Its numbers on the host, where `tilewise.parallel.fixed` has read them."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """Return the masks whose intersection this one is; none for Full."""
        return (self,)

    @property
    def hides_later_keys(self) -> bool:
        """Tell whether the mask hides every key after its query, whatever its tensors and numbers are."""
        from ..program.bounds import hides_later_keys  # on first use, for a quick import of the package

        traced = self.traced
        return traced.align == "last" and hides_later_keys(traced.program.text)

    def __and__(self, other: Any) -> "Mask":
        found = mask_of(other)
        return NotImplemented if found is None else intersect(self.parts + found.parts)

    def __rand__(self, other: Any) -> "Mask":
        found = mask_of(other)
        return NotImplemented if found is None else intersect(found.parts + self.parts)

    def __or__(self, other: Any) -> "Mask":
        found = mask_of(other)
        return NotImplemented if found is None else _joined("or", self, found)

    def __ror__(self, other: Any) -> "Mask":
        found = mask_of(other)
        return NotImplemented if found is None else _joined("or", found, self)

    def __invert__(self) -> "Mask":
        return _joined("not", self)

    def prepared(self, layout: Any, q: Tensor, k: Tensor) -> "Mask":
        """Return the mask as a call computes it, where that depends on the call's sizes."""
        return self

    def of_sizes(self, M: int, N: int) -> "Mask":
        """Return the same for M rows and N keys."""
        return self

    def of_whole(self, N: int) -> "Mask":
        """Return the same as a parallel call of N rows and keys takes it, which cuts tensors by rows, not by heads."""
        return self

    def keys(self, i: Any, b: slice = ALL) -> Ends:
        """Return the first key that row i of batch entries b sees and the one after its last, before clamping to
        [0, N). Only interval masks have it.
        """
        return -OPEN, OPEN

    def keep(self, at: Entries) -> Tensor:
        """Return a bool tensor, broadcast to (B, H, rows, columns): whether row i sees key j."""
        program, tensors, numbers, _ = self.traced
        return keep(program, self.rows(at), tensors, numbers)

    def dense(self, M: int, N: int, B: int | None = None, H: int | None = None) -> Tensor:
        """Return the whole mask as a bool tensor that broadcasts to (B, H, M, N), for the reference and plots.

        B and H are by default those that its tensors have.
        """
        B, H = [self._size(letter) if size is None else size for letter, size in (("B", B), ("H", H))]
        device = next((t.device for part in self.parts for t in part.tensors), torch.device("cpu"))
        at = Entries.of(B, H, M, N, device)
        seen = torch.ones(M, N, dtype=torch.bool, device=device)
        for part in self.parts:
            seen = seen & part.of_sizes(M, N).keep(at)
        return seen

    def _size(self, letter: str) -> int:
        """Return the size of a dimension that its tensors have, 1 if none has it."""
        return max([size for part in self.parts for size in part.sizes(letter)], default=1)


class Several(Mask):
    """A mask of several parts, or of none."""

    @staticmethod
    def rule(b, h, i, j):
        return True

    @property
    def traced(self) -> Aligned:
        parts = [part.traced for part in self.parts]
        return join("and", parts) if len(parts) > 1 else parts[0] if parts else super().traced

    @property
    def hides_later_keys(self) -> bool:
        return any([part.hides_later_keys for part in self.parts])

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return tuple([said for part in (*self.parts, *self.tile_lists) for said in part.key])

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        return tuple([t for part in (*self.parts, *self.tile_lists) for t in part.captured])


@dataclass(frozen=True, eq=False)
class Full(Several):
    """Show every key to every query."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class And(Several):
    """Show the keys that all of `masks` show; written `a & b`."""

    masks: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def to(self, device: torch.device | str | int) -> "And":
        return And(tuple([mask.to(device) for mask in self.masks]))


def mask_of(given: Any) -> Mask | None:
    """Return a mask, or that of a plain function; None for anything else."""
    return as_value(given, Mask, Mask.of)


def _joined(op: str, *masks: Mask) -> Mask:
    """Return a mask of others, joined by "or"; of one, by "not"."""
    names = " | ".join([mask.public_name() for mask in masks])
    where = names if op == "or" else f"~({names})"
    made: Any = MADE["MaskOf"]
    return made.from_program(join(op, [mask.traced for mask in masks]), where)


def intersect(parts: tuple[Mask, ...]) -> Mask:
    """Return the intersection of the masks `parts`."""
    return parts[0] if len(parts) == 1 else And(parts) if parts else Full()
