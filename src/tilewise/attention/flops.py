"""FLOP formulas of the operators, for torch.utils.flop_counter."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..call.check import describe_fake
from ..call.import_hook import when_imported
from ..call.operands import Operands
from ..call.recipe import Recipe
from .gradients import Longest, operands_of
from .op import attention_backward_op, attention_op


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
    *_, M, H, _ = q.shape
    if Recipe.decode(recipe).cached:
        p = describe_fake(Operands(q, k, k, tuple(extra)), Recipe.decode(recipe), longest)
        return q.shape[:-2].numel() * H * p.N
    if not Recipe.decode(recipe).varlen:
        return q.shape[0] * H * M * k.shape[-3]
    ends = extra[-2:]
    if any(cu.is_meta or is_fake(cu) for cu in ends):
        return H * (ends[0].shape[0] - 1) * longest[0] * longest[1]
    rows, keys = (cu.long().diff().clamp(0, most) for cu, most in zip(ends, longest, strict=True))
    return H * int((rows * keys).sum())


def _register_flops(counter: Any) -> None:
    counter.register_flop_formula(attention_op._opoverload.overloadpacket, get_raw=True)(_forward_flops)
    counter.register_flop_formula(attention_backward_op._opoverload.overloadpacket, get_raw=True)(_backward_flops)


when_imported("torch.utils.flop_counter", _register_flops)
