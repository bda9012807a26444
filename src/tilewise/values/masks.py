"""Attention masks: which keys each query sees. Combine them with `&`, `|` and `~`.

A mask has a PyTorch form and a kernel form. `keep` is the PyTorch form, for the reference and the CPU. `device` names
the kernel functions in tile/masks.py, `captures` and `shapes` describe the tensors that they read, and `arguments`
returns their arguments. Row indices i are shifted by N - M, so that the last query is aligned with the last key.
`rule` says the same as a plain function, from which `|` and `~` make programs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..program import Aligned, Entries, join, keep
from ..program.bounds import hides_later_keys
from ..program.shape import shape
from .function import DECORATE, MADE, Function, as_value, program_of
from .value import OPEN, Ends, Value


class Mask(Value):
    """Every mask derives from this class, and `Mask.of` makes one of a function.

    `mask & other` shows the keys that both show, `mask | other` those that one of them shows, and `~mask` the others.
    One of two masks may be a plain function.
    """

    rule: ClassVar[Callable[..., Any]]
    """The mask as a function of b, h, i, j and its fields."""
    align: ClassVar[str] = "last"
    """What the rule's i counts from (see program.Aligned)."""
    lists: tuple[Any, ...] = ()
    """TileLists of its tiles, which `tilewise.listed` has made."""
    held: Any = None
    """Its numbers on the host, where `tilewise.parallel.fixed` has read them."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """Return the masks whose intersection this one is; none for Full."""
        return (self,)

    @property
    def hides_later_keys(self) -> bool:
        """Tell whether the mask hides every key after its query, whatever its tensors hold."""
        return False

    @staticmethod
    def of(fn: Callable[..., Any] = DECORATE, *captured: Any, align: str = "first") -> Any:
        """Make a mask of a function fn(b, h, i, j, *captured) that returns a bool: whether query i sees key j.

        The function is traced at once, by one call with symbolic numbers. It may use Python's operators, the functions
        of torch in tilewise.program.FUNCTIONS, and captured tensors, of which it indexes every dimension. Python's
        `if`, `and`, `or` and `not` are refused: write torch.where, &, | and ~. Also a decorator: `@tw.Mask.of`, or
        `@tw.Mask.of(align="last")`. A plain function as `mask=` is traced in each call.

        Args:
            fn: a function of the batch entry b (with a layout, the sequence), the query head h, the row i, and the
                key j.
            captured: tensors, bool, whole or floating, of any shape on q's device, and numbers, for fn's parameters
                after j. Tensors that fn closes over are captured, too; numbers that it closes over are constants.
            align: "first": i counts rows from 0. "last": the last row's i is the last key's j, as in Causal.

        Returns:
            A Mask. Its `with_(*tensors)` is the same with other captured tensors. New contents of captured tensors
            count; they get no gradients.

        Raises:
            TypeError, ValueError: fn is no such function; the message names it, its line, and the remedy.
        """
        return (lambda made: MaskOf.of(made, captured, align)) if fn is DECORATE else MaskOf.of(fn, captured, align)

    @property
    def traced(self) -> Aligned:
        """Return the mask as a program, which says what `keep` does."""
        return program_of(self.rule, "mask", self.rule_takes, self.align)

    @property
    def rule_takes(self) -> tuple[Any, ...]:
        """Return what the rule takes after j."""
        return self._fields

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

    def keys(self, i: Any) -> Ends:
        """Return the first key that row i sees and the one after its last, before clamping to [0, N).

        Only interval masks have it.
        """
        return -OPEN, OPEN

    def ends(self, i: Any, shift: int) -> Ends:
        """Return the same for a mask that may need `shift` = N - M, which i contains, to find the row."""
        return self.keys(i)

    def keep(self, at: Entries) -> Tensor:
        """Return a bool tensor, broadcast to (B, H, rows, columns): whether row i sees key j."""
        lo, hi = self.ends(at.aligned, at.shift)
        return (at.j >= lo) & (at.j < hi)

    def dense(self, M: int, N: int, B: int = 1, H: int = 1) -> Tensor:
        """Return the whole mask as a bool tensor that broadcasts to (B, H, M, N), for the reference and plots.

        B and H are for functions of b and h.
        """
        device = next((t.device for part in self.parts for t in part.tensors), torch.device("cpu"))
        at = Entries.of(B, H, M, N, device)
        seen = torch.ones(M, N, dtype=torch.bool, device=device)
        for part in self.parts:
            seen = seen & part.keep(at)
        return seen


@dataclass(frozen=True, eq=False, repr=False)
class MaskOf(Function, Mask):
    """A mask that is a function, made by `Mask.of`, `|` and `~`."""

    what = "mask"
    device = ""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Return the captured tensors, which get no gradients."""
        return tuple([t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in self.given])

    @property
    def interval(self) -> bool:  # type: ignore[override]
        return shape(self.text).name == "A"

    @property
    def hides_later_keys(self) -> bool:
        return self.align == "last" and hides_later_keys(self.text)

    def keep(self, at: Entries) -> Tensor:
        return keep(self.program, self.rows(at), self.given, self.numbers)


MADE[MaskOf.__name__] = MaskOf


class Several(Mask):
    """A mask of several parts, or of none."""

    @property
    def traced(self) -> Aligned:
        parts = [part.traced for part in self.parts] or [program_of(lambda b, h, i, j: True, "mask", (), "first")]
        return join("and", parts) if len(parts) > 1 else parts[0]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return tuple([said for part in (*self.parts, *self.lists) for said in part.key])

    @cached_property
    def captured(self) -> tuple[Tensor, ...]:
        return tuple([t for part in (*self.parts, *self.lists) for t in part.captured])


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


@dataclass(frozen=True, eq=False)
class Listed(Several):
    """Show what `mask` shows, and carry lists of its tiles. `listed & other` is `mask & other`, whose tiles differ."""

    mask: Mask
    lists: tuple[Any, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts

    def to(self, device: torch.device | str | int) -> "Listed":
        return Listed(self.mask.to(device), tuple([one.to(device) for one in self.lists]))


def mask_of(given: Any) -> Mask | None:
    """Return a mask, or that of a plain function; None for anything else."""
    return as_value(given, Mask, Mask.of)


def _joined(op: str, *masks: Mask) -> Mask:
    """Return a mask of others, joined by "or"; of one, by "not"."""
    names = " | ".join([mask.public_name() for mask in masks])
    where = names if op == "or" else f"~({names})"
    return MaskOf.from_program(join(op, [mask.traced for mask in masks]), where)


def intersect(parts: tuple[Mask, ...]) -> Mask:
    """Return the intersection of the masks `parts`."""
    return parts[0] if len(parts) == 1 else And(parts) if parts else Full()
