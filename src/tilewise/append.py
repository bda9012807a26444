"""Write new keys and values into a cache, in place: append_; and copy its pages: copy_pages_."""

import ast
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .check_cache import refuse_gradients, unquantized, with_scales
from .layout import Cached
from .operator import NAMESPACE, OPERATORS, intercepted
from .problem import FLOATING_TYPES
from .quantized import Quantized
from .turn import turned


class Append(NamedTuple):
    """What `append_` does beside its operands: the layout's tensors by name, the angles, and the cache's rows."""

    layout: Mapping[str, Tensor]
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    capacity: int


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
    outside [starts[b], capacity) are dropped. If sequences share an entry and write one row, either may win.

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
    scales: tuple[Tensor, ...] = ()
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        k, v, scales = unquantized(k, v, layout)
    check_append(k, v, k_new, v_new, layout, cos, sin, q)
    refuse_gradients(k, v, k_new, v_new, *([] if q is None else [q]))
    names = repr((with_scales(layout.plain) if scales else layout.plain)[1])
    tensors = [*layout.tensors, *scales]
    arguments = k, v, k_new, v_new, tensors, names, cos, sin, bool(interleaved), q
    given = [t for t in (k, v, k_new, v_new, *tensors, cos, sin, q) if t is not None]
    turned = OPERATORS.append_(*arguments) if intercepted(given) else _append(*arguments)
    return None if q is None else turned


def copy_pages_(k: Tensor, v: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy pages of a cache, in place: k[target] = k[source], and so v. All are read before any is written.

    Args:
        k, v: (pages, P, H_k, size), changed in place.
        source, target: int32 or int64 (n,), pages; no target may occur twice.

    Raises:
        TypeError, ValueError: source or target are no integers of one shape.
    """
    for name, t in (("source", source), ("target", target)):
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            got = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(
                f"copy_pages_: {name} must be an int32 or int64 tensor, got {got}; convert it with .to(...)"
            )
    if source.ndim != 1 or source.shape != target.shape:
        raise ValueError(
            f"copy_pages_: source and target must have one shape (n,), got {tuple(source.shape)} and "
            f"{tuple(target.shape)}; give each page one place"
        )
    with torch.no_grad():
        for pages in (k, v):
            pages.index_copy_(0, target.long(), pages.index_select(0, source))


def check_append(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, layout: Cached, cos: Tensor | None, sin: Tensor | None,
    q: Tensor | None,
) -> None:  # fmt: skip
    """Raise a TypeError or ValueError if the arguments of `append_` do not fit."""
    if not isinstance(layout, Cached):
        raise TypeError(
            f"append_: layout must be a Cached, got {layout!r}; write layout=tilewise.Cached(lengths, table)"
        )
    outer = (layout.lengths.shape[0],) if layout.cu_q is None else ()
    shape = "(B, M, heads, head size)" if outer else "(T, heads, head size)"
    for name, t, like in (("k_new", k_new, k), ("v_new", v_new, v), ("q", q, k)):
        if t is None and name == "q":
            continue
        if not isinstance(t, Tensor) or not isinstance(like, Tensor):
            raise TypeError(
                f"append_: {name} must be a tensor, got {type(t).__name__}; convert it with torch.as_tensor(...)"
            )
        if like.ndim != 4 or t.ndim != (4 if outer else 3) or t.shape[: len(outer)] != outer:
            raise ValueError(f"append_: {name} must have shape {shape}, got {tuple(t.shape)}; reshape it, or set cu_q")
        if t.shape[:-2] != k_new.shape[:-2]:
            raise ValueError(
                f"append_: {name} must have k_new's rows {tuple(k_new.shape[:-2])}, got {tuple(t.shape)}; "
                "give each new key one"
            )
        heads = t.shape[-2:] if name != "q" else (like.shape[2], t.shape[-1])
        if heads != like.shape[2:] or t.device != like.device:
            raise ValueError(
                f"append_: {name} must have the cache's heads and head size {tuple(like.shape[2:])} on {like.device}, "
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
    if cos is not None and sin is not None:
        fits = cos.ndim == 2 and cos.shape == sin.shape and 0 < 2 * cos.shape[1] <= k.shape[3] and cos.shape[0] > 0
        if not fits:
            raise ValueError(
                f"append_: cos and sin must have shape (positions, R / 2), R at most {k.shape[3]}, got "
                f"{tuple(cos.shape)} and {tuple(sin.shape)}; pass one column for each pair"
            )


def _append(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Sequence[Tensor], names: str, cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, q: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write and turn, by the kernel on a GPU with Triton, else in torch."""
    layout = dict(zip(_names(names), tensors, strict=True))
    capacity = k.shape[1] * (layout["table"].shape[1] if "table" in layout else 1)
    call = Append(layout, cos, sin, interleaved, capacity)
    y = k_new.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch = _launcher() if k.is_cuda else None
    if launch is None:
        with torch.no_grad():
            _in_torch(k, v, k_new, v_new, q, y, call)
    else:
        launch(k, v, k_new, v_new, q, None if q is None else y, call)
    return y


_names: Any = lru_cache(64)(ast.literal_eval)
"""It reads the names of a layout's tensors, which the operator takes as text."""


def _in_torch(k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor, call: Append) -> None:
    """Write and turn, in plain torch."""
    b, row, there = places(k_new, call)
    fits = there & (row < call.capacity)
    fits &= row >= (call.layout["starts"].long()[b] if "starts" in call.layout else 0)
    entry = call.layout["index"].long()[b] if "index" in call.layout else b
    if call.cos is not None and call.sin is not None:
        at = row.masked_fill(~there, 0).clamp(0, len(call.cos) - 1)
        c, s = (t[at].to(torch.promote_types(k_new.dtype, torch.float32))[:, None] for t in (call.cos, call.sin))
        k_new = turned(k_new.reshape(-1, *k_new.shape[-2:]), c, s, call.interleaved)
        if q is not None:
            y.copy_(turned(q.reshape(-1, *q.shape[-2:]), c, s, call.interleaved).view(y.shape))
    entry, row = entry[fits], row[fits]
    if "table" in call.layout:
        P = k.shape[1]
        entry, row = call.layout["table"].long()[entry, row // P], row % P
    for name, pages, new in (("k_scale", k, k_new), ("v_scale", v, v_new)):
        rows = new.reshape(-1, *new.shape[-2:])[fits]
        if name in call.layout:
            factor = call.layout[name].expand(len(call.layout["lengths"]), k.shape[2])[b[fits]][..., None]
            bits = (rows.float() / factor).clamp(-448.0, 448.0).to(pages.dtype).view(torch.uint8)
            pages.view(torch.uint8)[entry, row] = bits
        else:
            pages[entry, row] = rows.to(pages.dtype)


def places(k_new: Tensor, call: Append) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each new key its sequence, its row, and whether a sequence has it."""
    lengths = call.layout["lengths"].long()
    B, count = len(lengths), k_new.shape[:-2].numel()
    t = torch.arange(count, device=k_new.device)
    if "cu_q" in call.layout:
        ends = call.layout["cu_q"].long().clamp(0, count)
        b = torch.searchsorted(ends[1:].contiguous(), t, right=True)
        there, b = b < B, b.clamp(max=max(B - 1, 0))
        return b, lengths[b] - (ends[b + 1] - t), there
    M = k_new.shape[1]
    return t // max(M, 1), lengths[t // max(M, 1)] - M + t % max(M, 1), torch.ones_like(t, dtype=torch.bool)


@cache
def _launcher() -> Any:
    """Return the kernel's launch, or None without a Triton that can compile it."""
    try:
        from .backend import check_triton

        check_triton()
        from .host.append import launch
    except ImportError:
        return None
    return launch


@torch.library.custom_op(f"{NAMESPACE}::append_", mutates_args=("k", "v"))
def append_op(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Sequence[Tensor], names: str, cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, q: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write new keys and values as one operator. `names` are those of the layout's tensors, as text."""
    return _append(k, v, k_new, v_new, tensors, names, cos, sin, interleaved, q)


@append_op.register_fake
def _(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Any, names: str, cos: Any, sin: Any, interleaved: bool,
    q: Tensor | None,
) -> Tensor:  # fmt: skip
    return k_new.new_empty(0) if q is None else q.new_empty(q.shape)
