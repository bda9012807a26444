"""What the functions of FlashAttention-2, -3 and -4 share: calls of tilewise, and their results as those functions'."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.api import attention, attention_qkvpacked
from ...call.dispatch import ReverseMode
from ...merge.api import merge
from ...values.cached import Cached
from ...values.dropout import Dropout, dropout_keep
from ...values.layout import Layout, Varlen
from ...values.products import Quantized
from ...values.value import Unsupported
from .arguments import Options

Result = Any
"""out; or, with return_attn_probs or its like, a tuple of out, softmax_lse and what else the function describes."""


class Forward(NamedTuple):
    """The results of a forward: o, lse, S_dmask as its function describes it, and dropout's seed."""

    o: Tensor
    lse: Tensor
    S_dmask: Tensor
    seed: Tensor | None


def combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Merge results over parts of the keys, (parts, B, M, H, D) and (parts, B, M, H), or (parts, T, …).

    Returns out, written to `out` if it is given, in out_dtype or its own type, and lse (B, M, H), or (T, H).
    """
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype must be that of out, {out.dtype}, got {out_dtype}; leave one of them out")
    o, lse = merge([(o, lse.transpose(-1, -2)) for o, lse in zip(out_partial, lse_partial, strict=True)])
    lse = lse.transpose(-1, -2)
    if out is not None:
        return out.copy_(o), lse
    return o if out_dtype is None else o.to(out_dtype), lse


def attend(
    operands: tuple[Tensor, ...],
    chosen: Options,
    layout: Layout | None = None,
    dropout: float = 0.0,
    return_attn_probs: bool = False,
) -> Result:
    """Run a function of FlashAttention-2 on q, k and v, or on qkv."""
    if isinstance(layout, Cached):
        found = without_gradients(lambda: tuple(forward(operands, chosen, layout, dropout)[:3]), *operands, chosen.sink)
        return found if return_attn_probs else found[0]
    if return_attn_probs:
        return tuple(forward(operands, chosen, layout, dropout)[:3])
    run = attention_qkvpacked if len(operands) == 1 else attention
    return run(*operands, **chosen._asdict(), dropout=dropout, layout=layout)


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Tell whether one of the tensors that are there learns."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def without_gradients(run: Callable[[], Any], *tensors: Tensor | None) -> Any:
    """Return the tensors that `run` computes from `tensors`, for inference; a backward through them raises Unsupported.

    So evaluation needs no torch.no_grad(), as in FlashAttention, and nothing learns from a gradient that is missing.
    """
    if not wants_gradients(*tensors):
        return run()
    with torch.no_grad():
        found = run()
    return _NoBackward.apply(len(found), *found, *[t for t in tensors if t is not None and t.requires_grad])


class _NoBackward(ReverseMode):
    """The identity of results that have no gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(
            "keys in pages and tensors in e4m3 are for inference and have no backward; gather the keys, or convert the "
            "tensors to 16 bits"
        )


def forward(
    operands: tuple[Tensor, ...],
    chosen: Options,
    layout: Layout | None,
    dropout: float,
    probabilities: bool = True,
) -> Forward:
    """Run one of those functions, and return what its backward and its tests want to know."""
    packed = len(operands) == 1
    seed = Dropout(dropout).seed(None, operands[0])
    run = attention_qkvpacked if packed else attention
    o, lse = run(*operands, **chosen._asdict(), dropout=dropout, seed=seed, layout=layout, return_lse=True)
    if seed is None or not probabilities:
        return Forward(o, lse, o.new_empty(0), seed)
    q, k, _ = operands[0].unbind(-3) if packed else operands
    q, k = q.to(o.dtype), k.to(o.dtype)  # autocast's type, if it is on
    whole = Whole(chosen, dropout, int(seed))
    with torch.autocast(q.device.type, enabled=False):
        return Forward(
            o, lse, whole.packed(q, k, lse, layout) if isinstance(layout, Varlen) else whole.padded(q, k, lse), seed
        )


def attend_chunks(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    chosen: Options,
    layout: Varlen | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return o and lse where a row sees the keys of its own chunk alone, or all where chunk is 0."""
    if chunk < 0:
        raise ValueError(f"attention_chunk must be >= 0, got {chunk}; pass 0 for none")
    if isinstance(q, Quantized) or isinstance(k, Quantized) or isinstance(v, Quantized):
        refuse_chunks_of_e4m3(chunk)
        given = {**chosen._asdict(), "layout": layout, "precision": "fp8", "return_lse": True}
        tensors = [t for one in (q, k, v) for t in ((one.x, one.scale) if isinstance(one, Quantized) else (one,))]
        return without_gradients(lambda: attention(q, k, v, **given), *tensors, chosen.sink)
    if chunk > 0 and layout is not None:
        layout = chunked(layout, chunk, layout.cu_q is not layout.cu_k)
    elif chunk > 0:
        (B, M), N = q.shape[:2], k.shape[1]
        layout = Varlen(equal_starts(q), equal_starts(k), M, N)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        o, lse = attention(*rows, **chosen._asdict(), layout=chunked(layout, chunk, M > N), return_lse=True)
        return o.unflatten(0, (B, M)), lse.unflatten(1, (B, M)).transpose(0, 1).contiguous()
    return attention(q, k, v, **chosen._asdict(), layout=layout, return_lse=True)


def refuse_chunks_of_e4m3(chunk: int) -> None:
    """Raise Unsupported if there are chunks."""
    if chunk > 0:
        raise Unsupported("attention_chunk is > 0, but q is in e4m3; convert q, k and v, or pass chunks as sequences")


def equal_starts(x: Tensor) -> Tensor:
    """Return int32 (B + 1,): where the sequences of x (B, length, …) start once they are packed."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


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


class Whole(NamedTuple):
    """It builds the whole matrix P, negated where dropout removed an entry."""

    options: Options
    dropout: float
    seed: int

    @torch.no_grad()
    def padded(self, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """Return P (B, H, M, N) in q's type."""
        P = q.new_zeros(*lse.shape, k.shape[1])
        for b in range(P.shape[0]):
            P[b] = self.entry(b, q[b], k[b], lse[b])
        return P

    @torch.no_grad()
    def packed(self, q: Tensor, k: Tensor, lse: Tensor, layout: Varlen) -> Tensor:
        """Return P (B, H, longest M, longest N), each sequence in its upper left corner. lse: (H, T)."""
        starts_q, starts_k = layout.cu_q.tolist(), layout.cu_k.tolist()
        P = q.new_zeros(len(starts_q) - 1, q.shape[1], *layout.longest())
        for b in range(P.shape[0]):
            rows, columns = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
            corner = self.entry(b, q[rows], k[columns], lse[:, rows])
            P[b, :, : corner.shape[1], : corner.shape[2]] = corner
        return P

    def entry(self, b: int, q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        """Return P (H, M, N) of batch entry b, from q (M, H, D), k (N, H_k, D) and lse (H, M)."""
        (M, H, D), N = q.shape, k.shape[0]
        k = k.repeat_interleave(H // k.shape[1], 1)
        S = torch.einsum("mhd,nhd->hmn", q.to(lse.dtype), k.to(lse.dtype))[None]
        S = S * (D**-0.5 if self.options.scale is None else self.options.scale)
        i, j = torch.arange(M, device=q.device)[:, None], torch.arange(N, device=q.device)[None, :]
        for change in self.options.score:
            alone: Any = change.at(b)
            S = alone.apply(S, i + N - M, j, N - M)
        hidden = ~self.options.mask.dense(M, N).to(q.device)
        P = torch.exp(S[0] - lse[:, :, None]).masked_fill(hidden, 0.0)
        row = b * H + torch.arange(H, device=q.device)[:, None, None]
        return torch.where(dropout_keep(self.seed, row, i, j, self.dropout), P, -P).to(q.dtype)
