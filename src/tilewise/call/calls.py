"""CALLS: what was computed of earlier calls, found by their options and one comparison of all tensors.

A key holds what values say, never an id, a version or an address. What is kept follows from it and from the tensors'
specs: the Problem of a call, and how its launches are repeated by addresses alone (host/repeat.py).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .check import asks_for_determinism, autocast_type, describe
from .dispatch import intercepted, transformed
from .operands import Operands
from .problem import Problem, matmul_setting
from .recipe import Recipe

MOST, OF_ONE_SHAPE = 4096, 8
"""How many entries are kept, and of those how many with one key and one set of shapes."""
dispatch_modes: Any = torch._C._len_torch_dispatch_stack


class Call:
    """The options of a call, without its tensors, and how its launches are repeated, once they have run."""

    def __init__(self, recipe: Recipe, longest: tuple[int, int], wants: bool = False) -> None:
        self.recipe, self.longest, self.wants = recipe, longest, wants
        self.forward: Any = None
        self.backward: Any = None


class Entry(NamedTuple):
    """What is kept, with the comparison that finds it."""

    alike: Any
    """Tells whether tensors are like those of the entry."""
    twice: tuple[int, ...] | None
    """Where each tensor is given first, if one is given twice: `alike` takes each once."""
    settings: Any
    """Settings of torch that `alike` does not see."""
    found: Any


CALLS: dict[Any, Entry] = {}
"""The last entry of each key."""
SHAPED: dict[Any, tuple[Entry, ...]] = {}
"""All entries, by key and shapes."""


class Specs:
    """Compare tensors in Python, where torch has no comparison in C."""

    def __init__(self, *tensors: Tensor, **_: Any) -> None:
        self.specs = _specs(tensors)

    def check(self, *tensors: Tensor) -> bool:
        """Tell whether tensors have the specs of those that it was made of, and nothing intercepts operators."""
        return not (intercepted(tensors) or transformed()) and _specs(tensors) == self.specs


def _specs(tensors: Sequence[Tensor]) -> list[Any]:
    return [(type(t), t.shape, t.dtype, t.device, t.stride(), t.requires_grad, t.is_inference()) for t in tensors]


GUARDS: Any = getattr(torch._C._dynamo.guards, "TensorGuards", Specs)  # type: ignore[attr-defined]
"""What compiled code guards tensors with: one comparison, in C, of classes, dispatch keys (with torch's modes), types,
devices, shapes, strides and requires_grad; not of alignment, nor of whether gradients are enabled."""


def guard(tensors: Sequence[Tensor]) -> Any:
    """Return a comparison with tensors like these, in torch's present modes. No tensor may be given twice."""
    return GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def key_of(
    given: list[Any], mask: Any, score: Any, sink: Any, layout: Any, precision: Any, deterministic: Any, *options: Any
) -> Any:
    """Return what all options say, without their tensors, which are appended to `given` in the order of Operands."""
    values = mask.key
    given += mask.captured
    for one in score:
        values += one.key
        given += one.captured
    if sink is not None:
        given.append(sink)
    if type(precision) is not str and precision is not None:
        given += precision.captured
        precision = precision.key
    given += layout.captured
    ordered = bool(deterministic) or asks_for_determinism()
    enabled = torch.is_grad_enabled()
    return values, len(score), sink is None, layout.key, precision, ordered, enabled, options


def find(key: Any, tensors: Sequence[Any]) -> Any:
    """Return what was kept of a call like this one, or None."""
    if dispatch_modes() or forward_ad._current_level >= 0:
        return None  # `alike` does not see these
    if (entry := CALLS.get(key)) is None:
        return None
    alike, twice, settings, found = entry
    same = twice is None and alike(*tensors) and (settings is None or settings == _settings(tensors[0]))
    return found if same else _search(key, tensors)


def _search(key: Any, tensors: Sequence[Any]) -> Any:
    once, twice, settings = _each_once(tensors)
    for entry in SHAPED.get((key, *[t.shape for t in tensors]), ()):
        if entry.twice == twice and entry.settings == settings and entry.alike(*once):
            CALLS[key] = entry
            return entry.found
    return None


def keep(key: Any, tensors: Sequence[Any], found: Any) -> None:
    """Keep what was computed of a call that nothing intercepts."""
    if len(SHAPED) >= MOST:
        SHAPED.clear()
        CALLS.clear()
    once, twice, settings = _each_once(tensors)
    entry, at = Entry(guard(once), twice, settings, found), (key, *[t.shape for t in tensors])
    CALLS[key], SHAPED[at] = entry, (entry, *SHAPED.get(at, ())[: OF_ONE_SHAPE - 1])


def forget() -> None:
    """Keep nothing of what was computed, as when a table of tile sizes has changed."""
    CALLS.clear()
    SHAPED.clear()


def _each_once(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], tuple[int, ...] | None, Any]:
    """Return each tensor once, where each is given first, and the settings of torch that a call depends on."""
    ids = [*map(id, tensors)]
    again = len(set(ids)) < len(ids)
    once = list({id(t): t for t in tensors}.values()) if again else tensors
    return once, tuple(map(ids.index, ids)) if again else None, _settings(tensors[0])


def _settings(q: Tensor) -> Any:
    """Return settings of torch for fp32 and under autocast; None elsewhere."""
    matmul = matmul_setting() if q.dtype == torch.float32 else None
    cast = autocast_type(q) if torch._C._is_any_autocast_enabled() else None  # type: ignore[attr-defined]
    return None if matmul is cast is None else (matmul, cast)


def plain(tensors: Sequence[Tensor]) -> bool:
    """Tell whether nothing but a back end sees a call with these tensors, so that it can be kept."""
    return not (intercepted(tensors) or transformed() or forward_ad._current_level >= 0)


def problem_of(x: Operands, recipe: Recipe, longest: tuple[int, int], wanted: tuple[bool, ...] = ()) -> Problem:
    """Return the Problem of a call with real tensors, as an earlier call has described it."""
    tensors = *x[:3], *x.extra
    places = tuple([t.data_ptr() % 16 == 0 for t in tensors]), x.k.data_ptr() == x.v.data_ptr()  # guards see neither
    key = recipe, longest, wanted, places
    if (found := find(key, tensors)) is None:
        found = describe(x, recipe, longest, wanted)
        if plain(tensors):
            keep(key, tensors, found)
    return found
