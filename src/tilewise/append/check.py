"""Check the arguments of append_, and describe the attention that reads what it writes."""

from ..call.check import refuse_operands
from ..call.operands import Operands
from ..call.recipe import Recipe
from ..values.intervals import Window
from ..values.value import FLOATING_TYPES
from .in_torch import Append

ITSELF = Window(0, 0)
"""With it, attention reads the rows that append_ writes, so the same checks are made."""


def check_append(call: Append) -> None:
    """Raise a TypeError or ValueError if new keys, values, q or angles do not fit the cache."""
    k, v, k_new, v_new, layout, cos, sin, _, q = call
    refuse_operands(k=k, v=v, k_new=k_new, v_new=v_new, **({} if q is None else {"q": q}))
    outer = layout.batch
    shape = "(B, M, heads, head size)" if outer else "(T, heads, head size)"
    for name, t, like in (("k_new", k_new, k), ("v_new", v_new, v), ("q", q, k)):
        if t is None:
            continue
        if t.ndim != len(outer) + 3 or t.shape[: len(outer)] != outer:
            raise ValueError(f"append_: {name} must have shape {shape}, got {tuple(t.shape)}; reshape it, or set cu_q")
        if t.shape[:-2] != k_new.shape[:-2]:
            raise ValueError(
                f"append_: {name} must have k_new's rows {tuple(k_new.shape[:-2])}, got {tuple(t.shape)}; "
                "give each new key one"
            )
        heads = t.shape[-2:] if name != "q" else (like.shape[-2], t.shape[-1])
        if heads != like.shape[-2:] or t.device != like.device:
            raise ValueError(
                f"append_: {name} must have the cache's heads and head size {tuple(like.shape[-2:])} on {like.device}, "
                f"got {tuple(t.shape)} on {t.device}; reshape it, or move it with .to(...)"
            )
        if t.dtype not in FLOATING_TYPES or (name != "q" and like.itemsize > 1 and t.dtype != like.dtype):
            raise TypeError(
                f"append_: {name} must be of the cache's type {like.dtype}, got {t.dtype}; convert it with .to(...)"
            )
    for name, t in (("k", k), ("v", v)):
        if t.stride(-1) != 1:
            raise ValueError(
                f"append_: {name} must have adjacent entries, got strides {t.stride()}; make it contiguous"
            )
    if (cos is None) != (sin is None) or (q is not None and cos is None):
        raise ValueError("append_: cos must be given with sin, and with q, got one without; pass both, or leave q out")
    if (angles := call.angles) is not None:
        angles.check(k_new)
        angles.check_columns(k.shape[-1])
        angles.check_positions(1)


def reading(call: Append) -> tuple[Operands, Recipe]:
    """Return the call of attention that reads the rows of the new keys, which stand for its queries."""
    layout = call.layout
    return Operands(call.k_new, call.k, call.v, layout.tensors), Recipe((ITSELF.plain,), layout=layout.plain)
