"""Write new keys and values into a cache, in place: append_."""

from contextlib import suppress

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call.backend import launch_module
from ..call.calls import find, keep, plain
from ..call.check import describe
from ..call.dispatch import CHECK, OPERATORS
from ..call.problem import Problem
from ..values.cached import Cached
from ..values.quantized import Quantized, unwrap_cache
from .check import check_append, reading
from .in_torch import Append
from .op import write


def append_(
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    k_new: Tensor,
    v_new: Tensor,
    *,
    layout: Cached,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q: Tensor | None = None,
) -> Tensor | None:
    """Write new keys and values to their rows of a cache, in place, with rotary applied if cos is given.

    The m new keys of sequence b become its rows lengths[b] - m to lengths[b] - 1: the layout's lengths count them
    already, so one layout serves append_ and then attention. A key is rotated by its row in the cache. Keys whose row
    is outside [starts[b], capacity) are dropped. So are those whose entry or page is not there, on a GPU; on a CPU that
    is an error, as in attention. If sequences share an entry and write one row, either may win.

    Args:
        k, v: the cache, as `Cached` describes it, entries adjacent; changed in place. Where they are Quantized, they
            get the new numbers divided by their scale, rounded to nearest even, and cut to e4m3's largest, 448.
        k_new: (B, M, H_k, D), or with the layout's cu_q (T, H_k, D), in k's type, or any for a Quantized.
        v_new: (B, M, H_k, D_v), or (T, H_k, D_v), so too.
        layout: the cache's layout, after the new keys.
        cos, sin: (positions, R / 2), as for `rotary`; positions beyond them read the last.
        interleaved: how pairs lie, as for `rotary`.
        q: (B, M, H, D) or (T, H, D), rotated by the same rows. It needs cos.

    Returns:
        q rotated, as a new tensor, or None without q.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: a gradient is wanted.
    """
    if not isinstance(layout, Cached):
        raise TypeError(
            f"append_: layout must be a Cached, got {layout!r}; write layout=tilewise.Cached(lengths, table)"
        )
    k, v, layout = unwrap_cache(k, v, layout)
    call = Append(k, v, k_new, v_new, layout, cos, sin, bool(interleaved), q)
    given, key, found = call.tensors, None, None
    if not is_compiling():
        key = append_, layout.key, q is None, cos is None, sin is None, call.interleaved, torch.is_grad_enabled()
        with suppress(AttributeError, TypeError):  # a wrong argument
            found = find(key, given)
    if found is None:
        check_append(call)
        layout.refuse_gradients(*given)
        if not plain(given):
            tensors, names = list(layout.tensors), repr(layout.plain[1])
            y = OPERATORS.append_(k, v, k_new, v_new, tensors, names, cos, sin, call.interleaved, q)
            return None if q is None else y
        found = Checked(describe(*reading(call), (0, 0)))
        keep(key, given, found)
    if found.repeat is not None:
        done, y = found.repeat.run(given)
        if done:
            return y
    y = write(call, found.problem)
    if found.repeat is None and found.problem.target != "cpu" and not CHECK and (kernel := launch_module("append")):
        found.repeat = kernel.repeated(call, y)
    return y


class Checked:
    """A call that was checked: the Problem of `reading`, and what repeats its launch, once it has run."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.repeat = problem, None
