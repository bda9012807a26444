"""Varlen functions of FlashAttention: packed sequences of which a part counts, or whose keys are in pages."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.api import attention
from ...call.dispatch import CHECK, intercepted
from ...values.layout import Varlen
from ...values.value import Unsupported, check_offsets
from .arguments import NO_DESCALES, Descales, Options, check_used, in_e4m3, quantized
from .bert_padding import starts_of
from .cache import cache_of, cached_parts
from .call import wants_gradients, without_gradients


class Sequences(NamedTuple):
    """The arguments that say where rows and keys are, how many of each sequence's first count, and their descales.

    Without cu_q, q is padded (B, M, H, D); without cu_k, so are k and v, unless they are in pages. With a chunk > 0, a
    row sees the keys of its own chunk alone.
    """

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    table: Tensor | None = None
    chunk: int = 0
    descales: Descales = NO_DESCALES

    @property
    def padded(self) -> bool:
        """Whether q, k and v are padded, if there are no pages, and all their rows count."""
        return self.cu_q is None and self.cu_k is None and self.used_q is None and self.used_k is None


class InUse(NamedTuple):
    """Where the rows of packed sequences go, those in use first: row r to `place[r]`, from row `order[n]` to n."""

    cu: Tensor
    place: Tensor
    order: Tensor

    @staticmethod
    def of(name: str, used: Tensor, cu: Tensor, rows: int) -> "InUse":
        """Return it for sequences that start at `cu` and use their first rows, whose number argument `name` says.

        A GPU's tensors are not read.
        """
        check_used(f"seqused_{name}", used, cu.shape[0] - 1)
        if (CHECK or not cu.is_cuda) and not intercepted([cu]):
            check_offsets(f"cu_{name}", cu, rows, rows)
        counts = torch.minimum(used.to(torch.int32), cu.diff()).clamp(min=0)
        ends = starts_of(counts)
        r = torch.arange(rows, dtype=torch.int32, device=cu.device)
        b = torch.searchsorted(cu[1:].contiguous(), r, right=True)  # B for rows of no sequence
        inside = r - cu[b]
        before = ends[(b + 1).clamp(max=counts.shape[0])]  # the rows in use in front of one that is not
        in_use = inside < torch.nn.functional.pad(counts, (0, 1))[b]
        place = torch.where(in_use, ends[b] + inside, ends[-1] + r - before).long()
        return InUse(ends, place, torch.empty_like(place).scatter(0, place, r.long()))

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of x (T, …) with those in use in front."""
        return x.new_empty(x.shape).index_copy(0, self.place, x)

    def unpack(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of o (T, …) and the columns of lse (H, T) where they were before `pack`."""
        return tuple(x.new_empty(x.shape).index_copy(dim, self.order, x) for dim, x in enumerate((o, lse)))  # type: ignore[return-value]


def attend_sequences(q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences) -> tuple[Tensor, Tensor]:
    """Return o and lse; o is 0 and lse -inf in rows that are not in use."""
    if at.chunk < 0:
        raise ValueError(f"attention_chunk must be >= 0, got {at.chunk}; pass 0 for none")
    if in_e4m3(q) and at.chunk > 0:
        raise Unsupported("attention_chunk is > 0, but q is in e4m3; convert q, k and v, or pass chunks as sequences")
    tensors = q, k, v, chosen.sink, *at.descales
    for_inference = at.table is not None or in_e4m3(q)
    if for_inference:
        cached = at.table is not None or at.used_q is not None or at.used_k is not None
    else:  # to read keys where they lie copies nothing, and splits them among programs
        cached = at.used_k is not None and at.chunk == 0 and not wants_gradients(*tensors)
    run = _attend_cached if cached else _attend if at.padded and at.chunk == 0 else _attend_packed
    given = q, k, v, chosen, at
    return without_gradients(lambda: run(*given), *tensors) if for_inference else run(*given)


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences) -> tuple[Tensor, Tensor]:
    if in_e4m3(q):
        return attention(*quantized((q, k, v), at.descales), **chosen._asdict(), precision="fp8", return_lse=True)
    return attention(q, k, v, **chosen._asdict(), return_lse=True)


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences) -> tuple[Tensor, Tensor]:
    """Gather the rows in use, attend to packed sequences, and put the results back."""
    rows, cu_q, max_q = _packed(q, at.cu_q, at.max_q)
    keys, cu_k, max_k = _packed(k, at.cu_k, at.max_k)
    values = _packed(v, at.cu_k, at.max_k)[0]
    of_q = of_k = None
    if at.used_q is not None:
        of_q = InUse.of("q", at.used_q, cu_q, rows.shape[0])
        rows, cu_q = of_q.pack(rows), of_q.cu
    if at.used_k is not None:
        of_k = InUse.of("k", at.used_k, cu_k, keys.shape[0])
        keys, values, cu_k = of_k.pack(keys), of_k.pack(values), of_k.cu
    layout = Varlen(cu_q, cu_k, max_q, max_k)
    if at.chunk > 0:
        layout = chunked(layout, at.chunk, k.shape[1] < q.shape[1] if at.padded else cu_q is not cu_k)
    o, lse = _attend(rows, keys, values, chosen._replace(layout=layout), at)
    return _as_given(q, at, *(o, lse) if of_q is None else of_q.unpack(o, lse))


def _attend_cached(q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences) -> tuple[Tensor, Tensor]:
    """Attend to keys where they lie, for inference."""
    k, v, layout = cached_parts(k, v, at.cu_q, at.cu_k, at.max_q, at.used_k, at.table)
    x, k, v = cache_of(q, k, v, at.cu_q, layout.lengths.shape[0], at.descales)
    if at.used_q is None:
        return attention(x, k, v, **chosen._replace(layout=layout)._asdict(), return_lse=True)
    rows, cu_q, max_q = _packed(x, at.cu_q, at.max_q)
    of_q = InUse.of("q", at.used_q, cu_q, rows.shape[0])
    chosen = chosen._replace(layout=replace(layout, cu_q=of_q.cu, max_q=max_q))
    o, lse = attention(of_q.pack(rows), k, v, **chosen._asdict(), return_lse=True)
    return _as_given(q, at, *of_q.unpack(o, lse))


def _packed(x: Tensor, cu: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Return rows (T, …), where their sequences start, and the longest one's length."""
    if cu is not None:
        return x, cu, longest
    B, length = x.shape[:2]
    return x.flatten(0, 1), torch.arange(B + 1, dtype=torch.int32, device=x.device) * length, length


def _as_given(q: Tensor, at: Sequences, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return o and lse in a batch where q is padded."""
    if at.cu_q is not None:
        return o, lse
    return o.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def chunked(layout: Varlen, chunk: int, more_rows: bool) -> Varlen:
    """Cut every sequence where a chunk of keys ends, without reading a tensor.

    Rows are aligned with the last key. With `more_rows`, a sequence may have more rows than keys; the rows before its
    first key are then a sequence without keys.
    """
    max_q, max_k = layout.longest()
    M, N = layout.cu_q.diff()[:, None], layout.cu_k.diff()[:, None]  # (B, 1)
    ends = torch.arange(0, max(max_k, 1) + chunk, chunk, dtype=torch.int32, device=N.device)
    ends = torch.minimum(ends, N)  # (B, chunks + 1)
    if more_rows:
        ends = torch.cat([(N - M).clamp(max=0), ends], 1)

    def starts(cu: Tensor, inside: Tensor) -> Tensor:
        return torch.cat([(cu[:-1, None] + inside.clamp(min=0))[:, :-1].flatten(), cu[-1:]])

    cu_q, cu_k = starts(layout.cu_q, ends + M - N), starts(layout.cu_k, ends)
    return Varlen(cu_q, cu_k, max_q if more_rows else min(chunk, max_q), min(chunk, max_k))
