"""Cached: keys and values in a cache, contiguous or in pages, for inference."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .layout import Layout, Sizes
from .value import INTEGER_TYPES, Unsupported, check_strided, constant, integer

BLOCK = 64
"""What `Cached.invariant` is a multiple of: the keys of one tile, at most."""


@dataclass(frozen=True, eq=False)
class Cached(Layout):
    """Keys and values in a cache, contiguous or in pages, for inference: gradients are refused.

    Without `table`, k is (entries, capacity, H_k, D) and v (entries, capacity, H_k, D_v): sequence b has the rows of
    entry `index[b]`, or b. With `table`, k is (pages, P, H_k, D) and v (pages, P, H_k, D_v), and row r of sequence b is
    row r % P of page `table[index[b] or b, r // P]`. k and v may have any strides. v may be k's first columns, as of
    latents (MLA).

    Sequence b has the keys in rows starts[b] <= r < lengths[b]. Their indices are j = r - starts[b], and there are
    N_b = lengths[b] - starts[b] of them. Masks and scores use N_b and the sequence's own number of queries, so its last
    query is aligned with its last key. No other row is read, and no entry of `table` that no query's keys need.

    Args:
        lengths: (B,) on q's device, the rows in use, with those that `append_` writes before the call. A length above
            the capacity is cut to it.
        table: (B, width) on q's device, the pages of each sequence, in order; sequences may share pages. Capacity is
            width * P.
        starts: (B,), the first row in use, for sequences padded on the left; None for 0.
        cu_q: (B + 1,), as in `Varlen`: q is packed (T, H, D). None: q is (B, M, H, D). In rows from cu_q[B] on, o is 0
            and lse -inf.
        max_q: the largest number of queries of a sequence, with cu_q. It chooses tiles and bounds nothing; None is T.
        index: (B,), the entry of k and v, or the row of `table`, in which a sequence lies; they may repeat. None for b.
        invariant: 0, or a multiple of 64. Then keys are summed in pieces of that many rows, so a sequence's results
            have the same bits in any batch, with any number of programs, and however its queries are cut into calls.

    Tensors are int32; of int64 a converted copy is made here, which does not follow later changes.

    Raises TypeError or ValueError for a wrong type, shape or number.
    """

    lengths: Tensor = field()
    table: Tensor | None = None
    _: KW_ONLY
    starts: Tensor | None = None
    cu_q: Tensor | None = None
    max_q: int | None = None
    index: Tensor | None = None
    invariant: int = 0
    __match_args__ = ("lengths", "table", "starts", "cu_q", "max_q", "index", "invariant")
    captures = ("lengths", "table", "starts", "cu_q", "index", "k_scale", "v_scale")
    numbers = ("invariant", "most")
    no_gradients = (
        "Cached is for inference and gives no gradients, and an operand has requires_grad=True; "
        "run it under torch.no_grad(), or gather the keys and pass them without a layout"
    )

    def __post_init__(self) -> None:
        shape = tuple(self.lengths.shape) if isinstance(self.lengths, Tensor) else ()
        B = shape[0] if shape else 0
        for name, dims, rows in (
            ("lengths", 1, B), ("table", 2, B), ("starts", 1, B), ("cu_q", 1, B + 1), ("index", 1, B),
        ):  # fmt: skip
            if getattr(self, name) is not None or name == "lengths":
                shared = name == "table" and self.index is not None
                object.__setattr__(self, name, _integers(name, getattr(self, name), dims, None if shared else rows))
        if self.max_q is not None:
            if self.cu_q is None:
                raise ValueError(f"Cached: max_q must be None without cu_q, got {self.max_q}; leave it out")
            longest = integer("Cached: max_q", self.max_q, "an int >= 0, or None for the number of q's rows")
            if longest < 0:
                raise ValueError(f"Cached: max_q must be >= 0, got {longest}; pass None for the number of q's rows")
            object.__setattr__(self, "max_q", longest)
        piece = constant(integer("Cached: invariant", self.invariant, f"0 or a multiple of {BLOCK}"))
        if piece < 0 or piece % BLOCK:
            raise ValueError(f"Cached: invariant must be 0 or a multiple of {BLOCK}, got {piece}; pass 1024, say")
        object.__setattr__(self, "invariant", piece)

    @property
    def needs(self) -> frozenset[str]:
        there = {
            "cache": True, "packed": self.cu_q is not None, "pages": self.table is not None,
            "starts in pages": self.table is not None and self.starts is not None, "index": self.index is not None,
            "invariant": self.invariant > 0, "8-bit keys": self.k_scale is not None,
            "few queries": self.most is not None,
        }  # fmt: skip
        return frozenset([name for name, needed in there.items() if needed])

    @property
    def unbounded(self) -> bool:
        return self.cu_q is not None

    @property
    def scaled(self) -> tuple[str, ...]:
        return () if self.k_scale is None else ("k", "v")

    def to(self, device: torch.device | str | int) -> "Cached":
        """Return the same layout with its tensors on a device."""
        moved = self.rebuild(self.plain, [t.to(device) for t in self.tensors])
        object.__setattr__(moved, "max_q", self.max_q)
        return moved

    def longest(self) -> tuple[int, int]:
        """Return max_q, or 0 for the number of q's rows, and 0: the shapes of k, v and table bound the keys."""
        return self.max_q or 0, 0

    @property
    def batch(self) -> tuple[int, ...]:
        """Return the dimensions of q in front of a sequence's rows: (B,), or () where it is packed."""
        return tuple(self.lengths.shape) if self.cu_q is None else ()

    def extent(self, k: tuple[int, ...]) -> tuple[int, int, int]:
        """Return how many entries a cache of k's shape has, or the table rows; the capacity; and the rows of a page, or
        0 without pages."""
        if self.table is None:
            return k[0], k[1], 0
        entries, width = self.table.shape
        return entries, width * k[1], k[1]

    def with_scales(self, k: Tensor, v: Tensor) -> "Cached":
        name, names, *numbers = self.plain
        scaled = self.rebuild((name, (*names, "k_scale", "v_scale"), *numbers), (*self.tensors, k, v))
        object.__setattr__(scaled, "max_q", self.max_q)
        return scaled

    def count(self, q: tuple[int, ...]) -> int:
        return self.lengths.shape[0]

    def sizes(self, q: tuple[int, ...], k: tuple[int, ...], longest: tuple[int, int]) -> Sizes:
        N = self.extent(k)[1]
        return Sizes(self.count(q), q[1] if self.cu_q is None else longest[0] or q[0], N, N)

    def refuse_backward(self) -> None:
        raise Unsupported("Cached is for inference and has no backward; gather the keys and pass them without a layout")

    def check_qkv(self, qkv: Tensor) -> None:
        raise ValueError("layout must be None or a Varlen with qkv, got a Cached; call attention with q and the cache")

    def check(self, problem: Any) -> None:
        p, packed = problem, self.cu_q is not None
        rank, shape = (3, "(T, H, D), with Cached's cu_q") if packed else (4, "(B, M, H, D), or (T, H, D) with cu_q")
        if len(p.q.shape) != rank:
            hint = "leave cu_q out" if packed and len(p.q.shape) == 4 else "reshape it, or give Cached cu_q"
            raise ValueError(f"q must have shape {shape}, got {tuple(p.q.shape)}; {hint}")
        B = self.lengths.shape[0]
        if not packed and p.q.shape[0] != B:
            raise ValueError(
                f"q must have one entry for each of Cached's {B} lengths, got a batch of {p.q.shape[0]}; give each "
                "sequence a length"
            )
        of_cache = "(pages, P, H_k, D)" if self.table is not None else "(entries, capacity, H_k, D)"
        for name, spec, scale in (("k", p.k, self.k_scale), ("v", p.v, self.v_scale)):
            if len(spec.shape) != 4:
                raise ValueError(f"{name} must have shape {of_cache}, got {tuple(spec.shape)}; reshape it")
            if scale is not None and tuple(scale.shape) not in ((), (p.H_k,), (B, p.H_k)):
                raise ValueError(
                    f"{name}'s scale must have shape (), ({p.H_k},) or ({B}, {p.H_k}), got {tuple(scale.shape)}; "
                    "reshape it"
                )
        if self.table is None and self.index is None and p.k.shape[0] < B:
            raise ValueError(
                f"k must have an entry for each of Cached's {B} lengths, got {p.k.shape[0]}; pass table or index for "
                "sequences that share entries"
            )
        if p.recipe.dropout > 0.0:
            raise Unsupported("Cached is for inference and goes with no dropout; leave dropout out")
        for kind in p.kinds:
            if why := kind.against_cache():
                raise Unsupported(
                    f"{kind.public_name()} does not go with Cached: {why}; use Causal, Window, Prefix, "
                    'Padding (lengths), SoftCap, Alibi or a function with align="last", or gather the keys and pass '
                    "them without a layout"
                )
        p.check_devices(self.named)

    def check_contents(self, p: Any, masks: Sequence[Any]) -> tuple[Any, Any]:
        lengths, table, index, cu_q = self.lengths, self.table, self.index, self.cu_q
        first, (entries, _, _) = self.first_rows(), self.extent(p.k.shape)
        if bool(((lengths < 0) | (first < 0)).any()):
            raise ValueError("Cached: lengths and starts must be >= 0, got a negative one; clamp them at 0")
        if index is not None and bool(((index < 0) | (index >= entries)).any()):
            raise ValueError(
                f"Cached: index must be in [0, {entries}), got {index.tolist()}; give each sequence an entry"
            )
        if cu_q is not None and (int(cu_q[0]) != 0 or int(cu_q[-1]) > p.q.shape[0] or bool((cu_q.diff() < 0).any())):
            raise ValueError(
                f"Cached: cu_q must start at 0, never decrease and end at {p.q.shape[0]} rows or before, got "
                f"{cu_q.tolist()}; write the cumulative sum of the numbers of queries"
            )
        for name, scale in (("k", self.k_scale), ("v", self.v_scale)):
            check_scale(name, scale)
        N = (lengths.clamp(max=p.N) - first).clamp(min=0)
        if table is not None:
            missing = (table < 0) | (table >= p.k.shape[0])
            if bool(missing.any()):  # as in tables that are padded
                queries = torch.full_like(N, p.M) if cu_q is None else cu_q.diff()
                lo, hi = _visible_keys(masks, queries, N)
                own = slice(None) if index is None else index.long()
                _check_pages(table[own], missing[own], first + lo, first + hi, p)
        return p.M, N

    def query_tiles(self, p: Any, size: int) -> tuple[int, int]:
        return super().query_tiles(p, size) if self.cu_q is None else (self.blocks(p.q.shape[0], p.B, size), p.H)

    def packed(self, p: Any) -> tuple[Any, Any, int, int] | None:
        return None if self.cu_q is None else (self.cu_q, self.cu_q, p.q.shape[0], p.q.shape[0])

    def page(self, p: Any) -> int | None:
        return self.extent(p.k.shape)[2]

    def offsets(self, M: int) -> Tensor:
        """Return where the sequences' queries begin and end in q's rows, (B + 1,): M each, or those of cu_q."""
        if self.cu_q is not None:
            return self.cu_q
        return torch.arange(len(self.lengths) + 1, device=self.lengths.device) * M

    def entries(self) -> Tensor:
        """Return in which entry of the cache, or row of the table, each sequence lies."""
        return torch.arange(len(self.lengths), device=self.lengths.device) if self.index is None else self.index

    def first_rows(self) -> Tensor:
        """Return the first row in use of each sequence."""
        return torch.zeros_like(self.lengths) if self.starts is None else self.starts

    def locate(self, b: Any, rows: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where rows of sequences b lie: in which entries or pages of the cache, in which of their rows, and
        whether there is such a place."""
        entries, capacity, page = self.extent(cache.shape)
        entry = self.entries()[b].long()
        inside = (rows >= self.first_rows()[b]) & (rows < capacity) & (entry >= 0) & (entry < entries)
        if self.table is None:
            return entry, rows, inside
        table = torch.nn.functional.pad(self.table, (0, 1, 0, 1), value=-1).long()  # other rows are on no page
        page = max(1, page)
        entry = table[entry.where(inside, -1), (rows // page).where(inside, -1)]
        return entry, rows % page, (entry >= 0) & (entry < len(cache))

    def at_once(self, M: int) -> int:
        return 1 if self.invariant else M

    def look_ups(self, p: Any, size: int) -> int:
        if self.table is None:
            return 0
        page = p.k.shape[1]
        return 1 if page % size == 0 and self.starts is None else -(-size // page)

    def splits_keys(self, p: Any) -> bool:
        return True

    def rows_of(self, t: Tensor, entries: slice, rows: slice) -> Tensor:
        return t.flatten(0, -3)[None, rows]

    def lse_of(self, lse: Tensor, entries: slice, rows: slice) -> Tensor:
        if self.cu_q is not None:
            return lse[None, :, rows]
        first = entries.start * lse.shape[2]
        return lse[entries, :, rows.start - first : rows.stop - first]


def check_scale(name: str, scale: Tensor | None) -> None:
    """Raise ValueError for a scale that is not positive and finite."""
    if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"{name}'s scale must be finite and > 0, got {scale.tolist()}; give zeros a scale of 1")


def _integers(name: str, t: Any, dims: int, rows: int | None) -> Tensor:
    """Return one of Cached's tensors as int32. It has `dims` dimensions, and if given so many `rows`."""
    shape = "(B, width)" if dims == 2 else "(B + 1,)" if name == "cu_q" else "(B,)"
    if not isinstance(t, Tensor):
        raise TypeError(
            f"Cached: {name} must be an int32 tensor of shape {shape}, got {type(t).__name__}; "
            "convert it with torch.tensor(..., dtype=torch.int32)"
        )
    if t.dtype not in INTEGER_TYPES:
        raise TypeError(f"Cached: {name} must be int32 or int64, got {t.dtype}; convert it with .to(torch.int32)")
    check_strided(f"Cached: {name}", t)
    if t.ndim != dims or (rows is not None and t.shape[0] != rows):
        hint = "give each sequence one row" if dims == 2 else "give each sequence one number, and cu_q one more"
        raise ValueError(f"Cached: {name} must have shape {shape}, got {tuple(t.shape)}; {hint}")
    return t.to(torch.int32)


def _visible_keys(masks: Sequence[Any], queries: Tensor, N: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each sequence the first key that any of its queries sees, and the one after the last."""
    first_row, last_row = (t[:, None, None, None] for t in (N - queries, N - 1))
    lo, hi = torch.zeros_like(first_row), last_row + 1
    for mask in masks:
        lo, hi = lo.clamp(min=mask.keys(first_row)[0]), hi.clamp(max=mask.keys(last_row)[1])
    lo, hi = lo.flatten(), hi.flatten()
    return lo, torch.where(queries > 0, hi, lo)


def _check_pages(table: Tensor, missing: Tensor, lo: Tensor, hi: Tensor, p: Any) -> None:
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
