"""FLOP formulas of the operators, for torch.utils.flop_counter."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..call.check import describe_fake
from ..call.dispatch import OPERATORS
from ..call.import_hook import when_imported
from ..call.operands import Operands
from ..call.recipe import Recipe
from . import op  # noqa: F401, which registers the operators
from .gradients import Longest, operands_of


def _forward_flops(
    q: Tensor, k: Any, v: Any, extra: Any, seed: Any, recipe: str, max_q: int, max_k: int, **kwargs: Any
) -> int:
    q, k, v, _ = operands_of((q, k, v))
    return _pairs(q, k, extra, recipe, (max_q, max_k)) * 2 * (q.shape[-1] + v.shape[-1])


def _backward_flops(
    do: Any, dlse: Any, q: Tensor, k: Any, v: Any, extra: Any, seed: Any, o: Any, lse: Any, recipe: str,
    max_q: int, max_k: int, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    q, k, v, _ = operands_of((q, k, v))
    return _pairs(q, k, extra, recipe, (max_q, max_k)) * 2 * (3 * q.shape[-1] + 2 * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, extra: Sequence[Tensor], recipe: str, longest: Longest) -> int:
    """Count the entries of all score matrices, ignoring masks.

    Lengths of packed sequences are read, which synchronises with a GPU. Fake tensors hold no lengths, so each of their
    sequences counts as long as the longest. Those in a cache count as long as its capacity.
    """
    p = describe_fake(Operands(q, k, k, tuple(extra)), Recipe.decode(recipe), longest)
    return p.H * p.recipe.layout_of(extra).pairs(p)


def _register_flops(counter: Any) -> None:
    counter.register_flop_formula(OPERATORS.attention, get_raw=True)(_forward_flops)
    counter.register_flop_formula(OPERATORS.attention_backward, get_raw=True)(_backward_flops)


when_imported("torch.utils.flop_counter", _register_flops)
