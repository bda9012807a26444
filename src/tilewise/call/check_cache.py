"""Validation of calls whose keys are in a cache (`layout=Cached(...)`)."""

from typing import Any

import torch
from torch import Tensor

from ..values.intervals import PaddingKeys
from ..values.layout import Cached
from ..values.masks import Mask
from ..values.products import Quantized
from ..values.score import Bias
from ..values.tables import Dense, Documents
from ..values.value import Unsupported
from .operands import Operands
from .problem import Problem

AS_WIDE = "its tensor would need a column for every row of the cache's capacity"
WHY = {
    Dense: AS_WIDE,
    PaddingKeys: AS_WIDE,
    Documents: "its key ids would need an entry for every row of the cache's capacity",
    Bias: AS_WIDE,
}
"""Why a cache does not go with some masks and scores; with others, for OF_ONE_LENGTH."""
OF_ONE_LENGTH = "it is for one number of queries and of keys, and a cache's sequences differ in theirs"


def refuse_gradients(*tensors: Tensor) -> None:
    """Raise Unsupported if a gradient is wanted."""
    if torch.is_grad_enabled() and any([t.requires_grad for t in tensors]):
        raise Unsupported(
            "Cached is for inference and gives no gradients, and an operand has requires_grad=True; "
            "run it under torch.no_grad(), or gather the keys and pass them without a layout"
        )


def unquantized(k: Any, v: Any, layout: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return k and v in 8 bits, and their scales. Raise an error if only one has one, or if there is no cache."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Quantized):
            raise TypeError(f"{name} must be a Quantized where the other is, got {type(t).__name__}; give both a scale")
    if not isinstance(layout, Cached):
        raise ValueError(
            f"layout must be a Cached where k is a Quantized and q is none, got {layout!r}; pass one, give q a scale, "
            "too, or convert k and v"
        )
    return k.x, v.x, (k.scale, v.scale)


def with_scales(plain: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a recipe holds of a layout, with the scales of k and v behind its tensors."""
    name, names, *numbers = plain
    return name, (*names, "k_scale", "v_scale"), *numbers


def check_cache(p: Problem) -> None:
    """Raise an error if the operands do not fit a cache, or the call has what a cache does not go with."""
    packed = p.in_layout("cu_q") is not None
    rank, shape = (3, "(T, H, D), with Cached's cu_q") if packed else (4, "(B, M, H, D), or (T, H, D) with cu_q")
    if len(p.q.shape) != rank:
        hint = "leave cu_q out" if packed and len(p.q.shape) == 4 else "reshape it, or give Cached cu_q"
        raise ValueError(f"q must have shape {shape}, got {tuple(p.q.shape)}; {hint}")
    if not packed and p.q.shape[0] != p.B:
        raise ValueError(
            f"q must have one entry for each of Cached's {p.B} lengths, got a batch of {p.q.shape[0]}; give each "
            "sequence a length"
        )
    of_cache = "(pages, P, H_k, D)" if p.in_layout("table") is not None else "(entries, capacity, H_k, D)"
    for name, spec in (("k", p.k), ("v", p.v)):
        if len(spec.shape) != 4:
            raise ValueError(f"{name} must have shape {of_cache}, got {tuple(spec.shape)}; reshape it")
        scale = p.in_layout(f"{name}_scale")
        if scale is not None and tuple(scale.shape) not in ((), (p.H_k,), (p.B, p.H_k)):
            raise ValueError(
                f"{name}'s scale must have shape (), ({p.H_k},) or ({p.B}, {p.H_k}), got {tuple(scale.shape)}; "
                "reshape it"
            )
    if "table" not in p.recipe.layout[1] and "index" not in p.recipe.layout[1] and p.k.shape[0] < p.B:
        raise ValueError(
            f"k must have an entry for each of Cached's {p.B} lengths, got {p.k.shape[0]}; pass table or index for "
            "sequences that share entries"
        )
    if p.recipe.dropout > 0.0:
        raise Unsupported("Cached is for inference and goes with no dropout; leave dropout out")
    for kind in p.kinds:
        if not (kind.interval and kind.varlen):
            why = WHY.get(kind, OF_ONE_LENGTH)
            raise Unsupported(
                f"{kind.public_name()} does not go with Cached: {why}; use Causal, Window, Prefix, Padding "
                "(lengths), SoftCap or Alibi, or gather the keys and pass them without a layout"
            )


def check_cache_contents(p: Problem, x: Operands, masks: tuple[Mask, ...]) -> Any:
    """Return each sequence's number of keys, once the values in Cached's tensors are checked."""
    lengths: Tensor = p.in_layout("lengths", x.extra)
    starts, index, table, cu_q = (p.in_layout(name, x.extra) for name in ("starts", "index", "table", "cu_q"))
    first = torch.zeros_like(lengths) if starts is None else starts
    if bool(((lengths < 0) | (first < 0)).any()):
        raise ValueError("Cached: lengths and starts must be >= 0, got a negative one; clamp them at 0")
    entries = (p.k if table is None else table).shape[0]
    if index is not None and bool(((index < 0) | (index >= entries)).any()):
        raise ValueError(f"Cached: index must be in [0, {entries}), got {index.tolist()}; give each sequence an entry")
    if cu_q is not None and (int(cu_q[0]) != 0 or int(cu_q[-1]) > p.q.shape[0] or bool((cu_q.diff() < 0).any())):
        raise ValueError(
            f"Cached: cu_q must start at 0, never decrease and end at {p.q.shape[0]} rows or before, got "
            f"{cu_q.tolist()}; write the cumulative sum of the numbers of queries"
        )
    for name in ("k", "v"):
        check_scale(name, p.in_layout(f"{name}_scale", x.extra))
    N = (lengths.clamp(max=p.N) - first).clamp(min=0)
    if table is not None:
        missing = (table < 0) | (table >= p.k.shape[0])
        if bool(missing.any()):  # as in tables that are padded
            queries = torch.full_like(N, p.M) if cu_q is None else cu_q.diff()
            lo, hi = _seen(masks, queries, N)
            own = slice(None) if index is None else index.long()
            _check_pages(table[own], missing[own], first + lo, first + hi, p)
    return N


def check_scale(name: str, scale: Tensor | None) -> None:
    """Raise ValueError for a scale that is not positive and finite."""
    if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"{name}'s scale must be finite and > 0, got {scale.tolist()}; give zeros a scale of 1")


def _seen(masks: tuple[Mask, ...], queries: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each sequence the first key that any of its queries sees, and the one after the last."""
    first_row, last_row = (t[:, None, None, None] for t in (N - queries, N - 1))
    lo, hi = torch.zeros_like(first_row), last_row + 1
    for mask in masks:
        lo, hi = lo.clamp(min=mask.keys(first_row)[0]), hi.clamp(max=mask.keys(last_row)[1])
    lo, hi = lo.flatten(), hi.flatten()
    return lo, torch.where(queries > 0, hi, lo)


def _check_pages(table: Tensor, missing: Tensor, lo: Tensor, hi: Tensor, p: Problem) -> None:
    """Raise ValueError if the rows lo..hi of a sequence need an entry of its table that is no page."""
    pages, P = p.k.shape[:2]
    begin = torch.arange(table.shape[1], device=table.device) * P
    needed = (begin + P > lo[:, None]) & (begin < hi[:, None]) & (lo < hi)[:, None]
    wrong = table[needed & missing]
    if len(wrong):
        raise ValueError(
            f"Cached: table must have pages in [0, {pages}) for the rows that a call reads or writes, got "
            f"{int(wrong[0])}; give the sequence a page, or lower its length"
        )
