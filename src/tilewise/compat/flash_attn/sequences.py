"""Varlen functions of FlashAttention: packed sequences of which a part counts, or whose keys are in pages."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.api import attention
from ...call.dispatch import CHECK, intercepted
from ...values.layout import Varlen, check_offsets
from .arguments import Options, check_used
from .cache import Angles, Cache, cached_parts
from .call import attend_chunks, equal_starts, refuse_chunks_of_e4m3, wants_gradients, without_gradients
from .descale import Descales, of_a_cache, with_descales

NO_DESCALES = None, None, None


class Sequences(NamedTuple):
    """The arguments of a varlen function that say where rows and keys are, and how many of each sequence's first count.

    Without cu_q, q is padded (B, M, H, D); without cu_k, so are k and v, unless they are in pages.
    """

    cu_q: Tensor | None
    cu_k: Tensor | None
    max_q: int | None
    max_k: int | None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    table: Tensor | None = None


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
        ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
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


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Options,
    at: Sequences,
    chunk: int = 0,
    descales: Descales = NO_DESCALES,
) -> tuple[Tensor, Tensor]:
    """Return o and lse of sequences; o is 0 and lse -inf in rows that are not in use."""
    tensors = q, k, v, chosen.sink, *descales
    if at.table is None and at.used_q is None and at.used_k is None:
        if at.cu_q is None and at.cu_k is None:
            return attend_chunks(*with_descales(q, k, v, descales), chosen, None, chunk)
        return _attend_packed(q, k, v, chosen, at, chunk, descales)
    if at.table is not None or q.dtype == torch.float8_e4m3fn:
        return without_gradients(lambda: _attend_cached(q, k, v, chosen, at, chunk, descales), *tensors)
    if at.used_k is None or chunk > 0 or wants_gradients(*tensors):
        return _attend_packed(q, k, v, chosen, at, chunk, descales)
    return _attend_cached(q, k, v, chosen, at, chunk, descales)  # it copies nothing, and splits keys among programs


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences, chunk: int, descales: Descales
) -> tuple[Tensor, Tensor]:
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
    o, lse = attend_chunks(*with_descales(rows, keys, values, descales), chosen, layout, chunk)
    return _as_given(q, at, *(o, lse) if of_q is None else of_q.unpack(o, lse))


def _attend_cached(
    q: Tensor, k: Tensor, v: Tensor, chosen: Options, at: Sequences, chunk: int, descales: Descales
) -> tuple[Tensor, Tensor]:
    """Attend to keys where they lie, for inference."""
    refuse_chunks_of_e4m3(chunk)
    k, v, layout = cached_parts(k, v, at.cu_q, at.cu_k, at.max_q, at.used_k, at.table)
    cache = Cache(k, v, layout.lengths, cu_q=at.cu_q)
    x, _, _, cache = of_a_cache(q, None, None, cache, Angles(None, None, False), descales)
    given = {**chosen._asdict(), "return_lse": True}
    if at.used_q is None:
        return attention(x, cache.k, cache.v, layout=layout, **given)
    rows, cu_q, max_q = _packed(x, at.cu_q, at.max_q)
    of_q = InUse.of("q", at.used_q, cu_q, rows.shape[0])
    layout = replace(layout, cu_q=of_q.cu, max_q=max_q)
    o, lse = attention(of_q.pack(rows), cache.k, cache.v, layout=layout, **given)
    return _as_given(q, at, *of_q.unpack(o, lse))


def _packed(x: Tensor, cu: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Return rows (T, …), where their sequences start, and the longest one's length."""
    return (x.flatten(0, 1), equal_starts(x), x.shape[1]) if cu is None else (x, cu, longest)


def _as_given(q: Tensor, at: Sequences, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return o and lse in a batch where q is padded."""
    if at.cu_q is not None:
        return o, lse
    return o.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
