"""Sequences whose keys are in a cache: their rows are gathered a tile at a time."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.backend import holding
from ..call.operands import Operands, Saved
from ..call.problem import Problem
from ..values.layout import Layout
from ..values.masks import Mask
from .sequences import COLUMNS, Sequence, choose_tiles, compute_type, heads_first

FUSED = "PyTorch's fused CPU kernel, keys from a cache, one sequence at a time"
FEW_ROWS = 64
FEW_COLUMNS = 1024
"""Keys of a tile with at most FEW_ROWS queries of a key head."""
MOST_COLUMNS = 1 << 14
"""Keys of a sequence, at most, that are gathered from pages at once for PyTorch's kernel."""
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Rows(NamedTuple):
    """One sequence's keys or values, read as a tensor (heads, length, size) by `rows[heads, columns]`.

    Only columns in [first, last), which some query sees, are fetched. Others are 0.
    """

    cache: Tensor
    """(capacity, H_k, size), or (pages, P, H_k, size) with `pages`."""
    pages: Tensor | None
    buffers: tuple[Tensor | None, Tensor | None]
    """What pages are gathered into, and what they are converted into; fresh memory would cost more than both."""
    start: int
    first: int
    last: int
    shape: tuple[int, int, int]
    scale: Tensor | None = None
    """(H_k,), what 8-bit rows are multiplied by."""

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        heads, columns = at
        lo, hi = max(columns.start, self.first), min(columns.stop, self.last)
        rows = self.fetch(self.start + lo, self.start + hi)
        typed = self.buffers[1]
        rows = (rows if typed is None else typed[: len(rows)].copy_(rows))[:, heads].transpose(0, 1)
        if self.scale is not None:
            rows = rows * self.scale[heads, None, None]
        outside = lo - columns.start, columns.stop - hi
        return torch.nn.functional.pad(rows, (0, 0, *outside)) if any(outside) else rows

    def fetch(self, lo: int, hi: int) -> Tensor:
        """Return rows lo..hi of the cache, (hi - lo, H_k, size)."""
        if self.pages is None:
            return self.cache[lo:hi]
        P = self.cache.shape[1]
        page, end = lo // P, -(-hi // P)
        gathered: Any = self.buffers[0]
        cache = self.cache.view(gathered.dtype)  # 8-bit floats as integers, which torch can gather
        rows = torch.index_select(cache, 0, self.pages[page:end], out=gathered[: end - page]).flatten(0, 1)
        rows = rows.view(self.cache.dtype)
        return rows[lo - page * P : hi - page * P]


def sequences(p: Problem, x: Operands) -> Iterator[Sequence]:
    """Yield the sequences one by one; where the cache's layout is invariant, each query by itself.

    Then a query's tiles depend on nothing but the keys that it sees. Positions of queries are those in q's rows.
    """
    masks, scores, _ = p.values(x.extra)
    q = x.q.reshape(-1, p.H, p.D)
    layout = p.recipe.layout_of(x.extra)
    width = columns(p)
    buffers = _buffers(p, x.k, width), _buffers(p, x.v, width)
    for b, rows, entry, start, N in _places(p, x):
        M = rows.stop - rows.start
        count = max(1, layout.at_once(M))
        heads = max(1, choose_tiles(p, (count, COLUMNS))[0] * COLUMNS // width)
        for i in range(0, M, count):
            shift = N - M + i
            first, last = _visible(masks, b, shift, shift + count - 1, N)
            keys, values = (
                Rows(*_entry(p, x, t, entry), own_buffers, start, first, last, (p.H_k, last, t.shape[-1]), scale)
                for t, own_buffers, scale in zip((x.k, x.v), buffers, scales_of(p, layout, b), strict=True)
            )
            where = slice(rows.start + i, rows.start + i + count)
            queries = heads_first(q[None, where], compute_type(p))
            yield Sequence(
                slice(b, b + 1), queries, keys, values, masks, scores, where, slice(0, last), heads, shift, width
            )


def fused(p: Problem, x: Operands) -> Saved:
    """Compute o and lse of one query a sequence with PyTorch's fused kernel, from the keys between the first and the
    last that it sees. A group's heads are the kernel's queries, so keys are read once."""
    masks, _, _ = p.values(x.extra)
    o, lse = x.q.new_empty(p.B, p.H_k, p.H // p.H_k, p.D_v), x.q.new_empty(p.B, p.H, 1, dtype=compute_type(p))
    q, places = x.q[:, 0].unflatten(1, (p.H_k, -1)), list(_places(p, x))
    width = max((N for *_, N in places), default=0)
    buffers = [_gathered(p, t, width) for t in (x.k, x.v)]
    for b, _, entry, start, N in places:
        first, last = _visible(masks, b, N - 1, N - 1, N)
        if first == last:
            o[b], lse[b] = 0.0, -torch.inf
            continue
        k, v = (
            Rows(*_entry(p, x, t, entry), (own, None), start, first, last, (p.H_k, N, t.shape[-1]))
            .fetch(start + first, start + last)
            .transpose(0, 1)[None]
            for t, own in zip((x.k, x.v), buffers, strict=True)
        )
        found = flash(q[b : b + 1], k, v, 0.0, False, scale=p.scale)
        o[b], lse[b] = found[0][0], found[1].reshape(p.H, 1)
    return Saved(o.flatten(1, 2)[:, None], lse.nan_to_num(torch.nan, torch.nan, -torch.inf))


def why_not_fused(p: Problem) -> list[str]:
    """Return what a call with a cache needs that `fused` lacks."""
    return holding({
        "several queries": p.layout.unbounded or p.M != 1 or p.B == 0,
        "a mask that is no interval": p.listed,
        "pieces of keys": p.layout.invariant > 0,
        "scores or a sink": bool(p.recipe.score) or p.recipe.sink,
        "8-bit keys": p.k.dtype != p.dtype,
        "another head size for v": p.D_v != p.D,
        "too many keys to gather at once": p.layout.table is not None and p.N > MOST_COLUMNS,
        "entries that are not adjacent": any([spec.stride[-1] != 1 for spec in (p.q, p.k, p.v)]),
    })  # fmt: skip


def columns(p: Problem) -> int:
    """Return how many keys a tile has: more where reading them takes longer than the products of so few rows."""
    rows = p.layout.at_once(p.M) * (p.H // p.H_k)
    return FEW_COLUMNS if rows <= FEW_ROWS else COLUMNS


def product_type(p: Problem) -> torch.dtype:
    """Return the type whose products are exact. Those of few rows wait for memory, and rounding all keys to bf16 again
    would take longer than they do."""
    return torch.float32 if columns(p) == FEW_COLUMNS else p.dtype


def describe(p: Problem) -> str:
    """Describe the tiles of a forward."""
    return f"keys from a cache, one sequence and {columns(p)} keys at a time"


def _buffers(p: Problem, t: Tensor, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate what `Rows` gathers and converts into."""
    kind = compute_type(p)
    return _gathered(p, t, width), None if t.dtype == kind else t.new_empty(width, *t.shape[2:], dtype=kind)


def _gathered(p: Problem, t: Tensor, width: int) -> Tensor | None:
    """Allocate what pages of `width` keys are gathered into; None without pages."""
    bits = torch.uint8 if t.itemsize == 1 else t.dtype
    pages = width // max(1, t.shape[1]) + 2
    return t.new_empty(pages, *t.shape[1:], dtype=bits) if p.layout.table is not None else None


def scales_of(p: Problem, layout: Layout, b: int) -> list[Tensor | None]:
    """Return the scales of a sequence's keys and values, (H_k,) each, or None."""
    kind = compute_type(p)
    return [None if t is None else t.expand(p.B, p.H_k)[b].to(kind) for t in (layout.k_scale, layout.v_scale)]


def _places(p: Problem, x: Operands) -> Iterator[tuple[int, slice, int, int, int]]:
    """Yield of each sequence its number, its queries' rows, its entry of the cache, its first row and its length."""
    layout: Any = p.recipe.layout_of(x.extra)
    ends = layout.offsets(p.M).tolist()
    places = zip(layout.lengths.tolist(), layout.first_rows().tolist(), layout.entries().tolist(), strict=True)
    for b, (length, start, entry) in enumerate(places):
        yield b, slice(ends[b], ends[b + 1]), entry, start, max(0, min(length, p.N) - start)


def _entry(p: Problem, x: Operands, t: Tensor, entry: int) -> tuple[Tensor, Tensor | None]:
    """Return a sequence's part of a contiguous cache, or the pages and which of them are its own."""
    table = p.recipe.layout_of(x.extra).table
    return (t[entry], None) if table is None else (t, table[entry])


def _visible(masks: Iterable[Mask], b: int, first: int, last: int, N: int) -> tuple[int, int]:
    """Return the first key that any of the rows first..last sees, and the one after the last."""
    lo, hi, own = 0, N, slice(b, b + 1)
    for mask in masks:
        lo = max(lo, int(mask.keys(first, own)[0]))
        hi = min(hi, int(mask.keys(last, own)[1]))
    return min(lo, max(hi, 0)), max(hi, 0)
