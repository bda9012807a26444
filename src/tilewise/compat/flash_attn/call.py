"""What the functions of FlashAttention-2, -3 and -4 share: calls of tilewise, and their results as those functions'."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention.api import attention, attention_qkvpacked
from ...call.dispatch import ReverseMode
from ...merge.api import merge
from ...program import Entries
from ...values.dropout import Dropout, dropout_keep
from ...values.value import Unsupported
from .arguments import Options

Result = Any
"""out; or, with return_attn_probs or its like, a tuple of out, softmax_lse and what else the function describes."""


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge results over parts of the keys: (parts, B, M, H, D) and (parts, B, M, H), or packed (parts, T, …).

    Returns out, written to `out` if it is given, in out_dtype or its own type, and lse (B, M, H), or (T, H).
    """
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype must be that of out, {out.dtype}, got {out_dtype}; leave one of them out")
    o, lse = merge([(o, lse.transpose(-1, -2)) for o, lse in zip(out_partial, lse_partial, strict=True)])
    lse = lse.transpose(-1, -2)
    if out is not None:
        return out.copy_(o), lse
    return o if out_dtype is None else o.to(out_dtype), lse


def attend(operands: tuple[Tensor, ...], chosen: Options, return_attn_probs: bool) -> Result:
    """Run a function of FlashAttention-2 on q, k and v, or on qkv."""
    if not return_attn_probs and not chosen.layout.no_gradients:
        return _attention(*operands, **chosen._asdict())

    def run() -> tuple[Tensor, ...]:
        return forward(operands, chosen, Dropout(chosen.dropout).seed(None, operands[0]))

    found = without_gradients(run, *operands, chosen.sink) if chosen.layout.no_gradients else run()
    return found if return_attn_probs else found[0]


def _attention(*operands: Tensor, **options: Any) -> Any:
    return (attention_qkvpacked if len(operands) == 1 else attention)(*operands, **options)


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
    operands: tuple[Tensor, ...], chosen: Options, seed: Tensor | None, probabilities: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, lse and S_dmask, as FlashAttention-2 describes it; it is empty without dropout or `probabilities`."""
    o, lse = _attention(*operands, **chosen._asdict(), seed=seed, return_lse=True)
    if seed is None or not probabilities:
        return o, lse, o.new_empty(0)
    q, k = (operands if len(operands) == 3 else operands[0].unbind(-3))[:2]
    q, k = q.to(o.dtype), k.to(o.dtype)  # autocast's type, if it is on
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return o, lse, _signed_probabilities(q, k, lse, chosen, int(seed))


def _signed_probabilities(q: Tensor, k: Tensor, lse: Tensor, chosen: Options, seed: int) -> Tensor:
    """Return P (B, H, longest M, longest N) in q's type, negated where dropout removed an entry.

    Each sequence is in its upper left corner, and all else is 0.
    """
    layout, H = chosen.layout, q.shape[-2]
    sizes = layout.sizes(q.shape, k.shape, layout.longest())
    scale = q.shape[-1] ** -0.5 if chosen.scale is None else chosen.scale
    all_heads = torch.arange(sizes.B * H, device=q.device).view(sizes.B, H, 1, 1)
    P = q.new_zeros(sizes.B, H, sizes.M, sizes.N)
    q, k = q.to(lse.dtype), k.repeat_interleave(H // k.shape[-2], -2).to(lse.dtype)
    for entries, rows, keys in layout.groups(sizes):
        of_q, of_k = layout.rows_of(q, entries, rows), layout.rows_of(k, entries, keys)
        M, N = of_q.shape[1], of_k.shape[1]
        at = Entries.at((entries, slice(0, H), slice(0, M), slice(0, N)), N - M, q.device)
        S = torch.einsum("bmhd,bnhd->bhmn", of_q, of_k) * scale
        for change in chosen.score:
            S = change.apply(S, at)
        hidden = ~chosen.mask.dense(M, N).to(q.device)
        own = torch.exp(S - layout.lse_of(lse, entries, rows)[..., None]).masked_fill(hidden, 0.0)
        P[entries, :, :M, :N] = torch.where(
            dropout_keep(seed, all_heads[entries], at.i, at.j, chosen.dropout), own, -own
        )
    return P
