"""Look up what kind of call was checked before: a check takes longer than a launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..values.layout import PADDED, Layout
from ..values.masks import Mask
from .check import asks_for_determinism, autocast_type, describe, seen
from .dispatch import intercepted, transformed
from .operands import Operands
from .problem import Problem, matmul_setting
from .recipe import KINDS, Recipe

Call = tuple[Recipe, tuple[int, int], Problem | None]
"""Everything about a call but its tensors: recipe, max_q and max_k, and the Problem where it is described already."""
Calls = dict[Any, tuple[Call, bool]]
"""A checked call of each kind, and whether it wants a gradient."""
KNOWN: Calls = {}
"""Those of `attention`."""
MOST = 4096
"""How many kinds of calls are kept."""
NUMBERS = {type(None), float, str, torch.dtype}
"""Types of options of which equal values make equal calls."""


def kind_of(
    x: Sequence[Any], mask: Any, score: Any, layout: Layout | None, deterministic: Any, *options: Any
) -> tuple[Any, ...] | None:
    """Return everything on which the checks and the launch of a call depend, except what tensors hold; hashable.

    `x`: q, k, v and the layout's tensors. None stands for a call that also depends on others, as masks and scores with
    tensors do, or that `attend` does not run at once.
    """
    if (
        intercepted(x)
        or transformed()
        or forward_ad._current_level >= 0
        or not NUMBERS.issuperset(map(type, options))
        or not isinstance(mask, Mask)
        or type(score) is not tuple
        or not isinstance(layout or PADDED, Layout)
        or (layout is not None and layout.unread)
    ):
        return None
    values = mask.parts + mask.lists + score
    if any([KINDS.get(type(value).__name__) is not type(value) or value.captures for value in values]):
        return None
    try:
        tensors = seen(x), tuple([t.requires_grad for t in x])
    except RuntimeError:  # a sparse tensor has no address
        return None
    of_layout = ((layout or PADDED).plain, (layout or PADDED).longest())
    matmul = matmul_setting() if x[0].dtype == torch.float32 else None
    plain = len(score), tuple([(type(value), value.plain) for value in values])
    ordered = bool(deterministic) or asks_for_determinism()
    cast = autocast_type(x[0]) if torch._C._is_any_autocast_enabled() else None
    return tensors, plain, of_layout, options, ordered, matmul, cast, torch.is_grad_enabled()


def remember(calls: Calls, kind: Any, x: Operands, recipe: Recipe, longest: tuple[int, int]) -> None:
    """Keep a checked call under its kind."""
    if len(calls) >= MOST:
        calls.clear()
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (*x[:3], *x.extra))
    calls[kind] = (recipe, longest, describe(x, recipe, longest)), wants
