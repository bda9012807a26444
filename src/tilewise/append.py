"""Write new keys and values into a cache, in place: append_; and copy its pages: copy_pages_."""

import ast
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .check import check_contents, check_pair, describe, describe_fake, refuse_operands
from .check_cache import refuse_gradients, unquantized, with_scales
from .known import Calls, kind_of, remember
from .layout import Cached
from .mask import Full, Window
from .operator import CHECK, NAMESPACE, OPERATORS, intercepted
from .problem import FLOATING_TYPES, Operands, Recipe
from .quantized import Quantized
from .turn import check_columns, check_positions, check_tables, turned

FULL = Full()
ITSELF = Window(0, 0)
"""With it, attention reads the rows that append_ writes, so the same checks are made."""
KNOWN: Calls = {}
"""The calls of attention that read what append_ has written, by kind of call."""


class Append(NamedTuple):
    """What `append_` does beside its operands: the layout's tensors by name, the angles, and the cache's rows."""

    layout: Mapping[str, Tensor]
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    capacity: int
    kind: Any = None
    """All that a launch depends on but addresses, if it is known."""


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
    scales: tuple[Tensor, ...] = ()
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        k, v, scales = unquantized(k, v, layout)
    operands = {"k": k, "v": v, "k_new": k_new, "v_new": v_new, "cos": cos, "sin": sin, "q": q}
    given, tensors = {name: t for name, t in operands.items() if t is not None}, [*layout.tensors, *scales]
    kind = kind_of([*given.values(), *tensors], FULL, (), layout, False, " ".join(given))
    if kind not in KNOWN:
        check_append(layout=layout, **operands)
        refuse_gradients(*given.values())
        names = (with_scales(layout.plain) if scales else layout.plain)[1]
        if kind is None:
            turned = OPERATORS.append_(k, v, k_new, v_new, tensors, repr(names), cos, sin, bool(interleaved), q)
            return None if q is None else turned
        remember(KNOWN, kind, *_reading(k, v, k_new, tensors, names), (0, 0))
    (*_, problem), _ = KNOWN[kind]
    turned = _append(k, v, k_new, v_new, tensors, cos, sin, bool(interleaved), q, problem, kind)
    return None if q is None else turned


def copy_pages_(k: Tensor | Quantized, v: Tensor | Quantized, source: Tensor, target: Tensor) -> None:
    """Copy pages of a cache, in place: k[target] = k[source], and so v. All are read before any is written.

    Args:
        k, v: (pages, P, H_k, size), changed in place; they may share memory. Scales of Quantized stay as they are.
        source, target: int32 or int64 (n,), pages; no target may occur twice.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    k, v = (t.x if isinstance(t, Quantized) else t for t in (k, v))
    refuse_operands(k=k, v=v)
    check_pair(k.shape, v.shape)
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
    if (CHECK or not k.is_cuda) and not intercepted((k, v, source, target)):
        _check_numbers(len(k), source, target)
    with torch.no_grad():
        caches = [t.view(torch.uint8) if t.itemsize == 1 else t for t in (k, v)]  # torch copies no 8-bit floats
        pages = [t.index_select(0, source) for t in caches]
        for t, copied in zip(caches, pages, strict=True):
            t.index_copy_(0, target.long(), copied)


def _check_numbers(pages: int, source: Tensor, target: Tensor) -> None:
    """Raise ValueError for pages that are not there, or a target that occurs twice."""
    for name, t in (("source", source), ("target", target)):
        if bool(((t < 0) | (t >= pages)).any()):
            raise ValueError(f"copy_pages_: {name} must hold pages in [0, {pages}), got {t.tolist()}; leave others out")
    if len(target.unique()) < len(target):
        raise ValueError(
            f"copy_pages_: target must hold each page once, got {target.tolist()}; leave out all copies but one"
        )


def check_append(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, layout: Cached, cos: Tensor | None, sin: Tensor | None,
    q: Tensor | None,
) -> None:  # fmt: skip
    """Raise a TypeError or ValueError if new keys, values, q or angles do not fit the cache."""
    refuse_operands(k=k, v=v, k_new=k_new, v_new=v_new, **({} if q is None else {"q": q}))
    outer = (layout.lengths.shape[0],) if layout.cu_q is None else ()
    shape = "(B, M, heads, head size)" if outer else "(T, heads, head size)"
    for name, t, like in (("k_new", k_new, k), ("v_new", v_new, v), ("q", q, k)):
        if t is None:
            continue
        if t.ndim != (4 if outer else 3) or t.shape[: len(outer)] != outer:
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
    if cos is not None and sin is not None:
        check_tables(k_new, cos, sin)
        check_columns(cos.shape[1], k.shape[-1])
        check_positions(1, cos.shape[0])


def _reading(
    k: Tensor, v: Tensor, k_new: Tensor, tensors: Sequence[Tensor], names: tuple[str, ...]
) -> tuple[Operands, Recipe]:
    """Return the call of attention that reads the rows of the new keys, which stand for its queries."""
    return Operands(k_new, k, v, tuple(tensors)), Recipe((ITSELF.plain,), layout=(Cached.__name__, names, 0))


def _append(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Sequence[Tensor], cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, q: Tensor | None, problem: Any, kind: Any = None,
) -> Tensor:  # fmt: skip
    """Write and turn, by the kernel on a GPU with Triton, else in torch. `problem`: that of `_reading`."""
    if CHECK or not k.is_cuda:
        check_contents(problem, Operands(k_new, k, v, tuple(tensors)))
    call = Append(dict(zip(problem.recipe.layout[1], tensors, strict=True)), cos, sin, interleaved, problem.N, kind)
    y = k_new.new_empty(0) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch = _launcher() if k.is_cuda and problem.B else None
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
    if call.cos is not None and call.sin is not None:
        at = row.masked_fill(~there, 0).clamp(0, len(call.cos) - 1)
        c, s = (t[at].to(torch.promote_types(k_new.dtype, torch.float32))[:, None] for t in (call.cos, call.sin))
        k_new = turned(k_new.reshape(-1, *k_new.shape[-2:]), c, s, call.interleaved)
        if q is not None:
            y.copy_(turned(q.reshape(-1, *q.shape[-2:]), c, s, call.interleaved).view(y.shape))
    t, b, row, entry = addresses(b, row, there, k, call)
    for name, pages, new in (("k_scale", k, k_new), ("v_scale", v, v_new)):
        rows = new.reshape(-1, *new.shape[-2:])[t]
        if name in call.layout:
            factor = call.layout[name].expand(len(call.layout["lengths"]), k.shape[2])[b][..., None]
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
        b = torch.searchsorted(ends, t, right=True) - 1
        there, row = (b >= 0) & (b < B), torch.zeros_like(t)
        own = b[there]
        row[there] = lengths[own] - (ends[own + 1] - t[there])
        return b, row, there
    M = max(1, k_new.shape[1])
    return t // M, lengths[t // M] - M + t % M, torch.ones_like(t, dtype=torch.bool)


def addresses(b: Tensor, row: Tensor, there: Tensor, k: Tensor, call: Append) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of the new keys that the cache has room for their numbers, sequences, rows, and entries or pages."""
    layout, P = call.layout, max(1, k.shape[1])
    t = there.nonzero()[:, 0]
    b, row = b[t], row[t]
    fits = (row >= (layout["starts"].long()[b] if "starts" in layout else 0)) & (row < call.capacity)
    t, b, row = t[fits], b[fits], row[fits]
    entry = layout["index"].long()[b] if "index" in layout else b
    if "table" in layout:
        table = layout["table"].long()
        fits = (entry >= 0) & (entry < len(table))
        t, b, row = t[fits], b[fits], row[fits]
        entry, row = table[entry[fits], row // P], row % P
    fits = (entry >= 0) & (entry < len(k))
    return t[fits], b[fits], row[fits], entry[fits]


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
    problem = describe(*_reading(k, v, k_new, tensors, _names(names)), (0, 0))
    return _append(k, v, k_new, v_new, tensors, cos, sin, interleaved, q, problem)


@append_op.register_fake
def _(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, tensors: Any, names: str, cos: Any, sin: Any, interleaved: bool,
    q: Tensor | None,
) -> Tensor:  # fmt: skip
    describe_fake(*_reading(k, v, k_new, tensors, _names(names)), (0, 0))
    return k_new.new_empty(0) if q is None else q.new_empty(q.shape)
