"""Write new keys and values into a cache, in place: append_."""

from torch import Tensor

from ..call.calls import Calls, kind_of, remember
from ..call.dispatch import OPERATORS
from ..values.cached import Cached
from ..values.masks import Full
from ..values.products import Quantized, unwrap_cache
from .check import check_append, reading
from .op import write

FULL = Full()
KNOWN: Calls = {}
"""The calls of attention that read what append_ has written, by kind of call."""


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
    """Write new keys and values to their rows of a cache, in place, turned by rotary if cos is given.

    The m new keys of sequence b become its rows lengths[b] - m to lengths[b] - 1: the layout's lengths count them
    already, so one layout serves append_ and then attention. A key is turned by its row in the cache. Keys whose row is
    outside [starts[b], capacity) are dropped. So are those whose entry or page is not there, on a GPU; on a CPU that is
    an error, as in attention. If sequences share an entry and write one row, either may win.

    Args:
        k, v: the cache, as `Cached` describes it, entries adjacent; changed in place. Where they are Quantized, they
            get the new numbers divided by their scale, rounded to nearest even, and cut to e4m3's largest, 448.
        k_new: (B, M, H_k, D), or with the layout's cu_q (T, H_k, D), in k's type, or any for a Quantized.
        v_new: (B, M, H_k, D_v), or (T, H_k, D_v), so too.
        layout: the cache's layout, after the new keys.
        cos, sin: (positions, R / 2), as for `rotary`; positions beyond them read the last.
        interleaved: how pairs lie, as for `rotary`.
        q: (B, M, H, D) or (T, H, D), turned by the same rows. It needs cos.

    Returns:
        q turned, as a new tensor, or None without q.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: a gradient is wanted.
    """
    if not isinstance(layout, Cached):
        raise TypeError(
            f"append_: layout must be a Cached, got {layout!r}; write layout=tilewise.Cached(lengths, table)"
        )
    k, v, lies = unwrap_cache(k, v, layout)
    operands = {"k": k, "v": v, "k_new": k_new, "v_new": v_new, "cos": cos, "sin": sin, "q": q}
    given, tensors = {name: t for name, t in operands.items() if t is not None}, lies.tensors
    kind = kind_of([*given.values(), *tensors], FULL, (), lies, False, " ".join(given))
    if kind not in KNOWN:
        check_append(layout=layout, **operands)
        layout.refuse_gradients(*given.values())
        names = lies.plain[1]
        if kind is None:
            turned = OPERATORS.append_(k, v, k_new, v_new, list(tensors), repr(names), cos, sin, bool(interleaved), q)
            return None if q is None else turned
        remember(KNOWN, kind, *reading(k, v, k_new, tensors, names), (0, 0))
    (*_, problem), _ = KNOWN[kind]
    turned = write(k, v, k_new, v_new, tensors, cos, sin, bool(interleaved), q, problem, kind)
    return None if q is None else turned
