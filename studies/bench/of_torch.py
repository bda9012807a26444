"""PyTorch's own attentions: how SDPA, FlexAttention and varlen_attn compute a case, and what they lack for it."""

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilewise.values.intervals import Window

from .suites import Case

Attention = Callable[..., Tensor]
"""o from q, k, v, and the sink of a case that has one."""


def seen(case: Case, device: torch.device) -> Callable[..., Any]:
    """Return a function of b, h, i and j, which tells whether a query sees a key."""
    ends = torch.tensor(case.lengths, device=device)
    of = torch.arange(len(ends), device=device).repeat_interleave(ends) if case.varied.packed else None

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        found = [part.rule(b, h, i, j, *part.rule_takes) for part in case.mask.parts]
        found += [j < ends[b]] if case.varied.padded else []
        found += [] if of is None else [of[i] == of[j]]
        total = found[0]
        for each in found[1:]:
            total = total & each
        return total

    return visible


def hides(case: Case) -> bool:
    """Tell whether a case hides more than is_causal does."""
    return bool(case.varied.mask.parts or case.varied.padded or case.varied.packed)


def sdpa(case: Case, device: torch.device) -> Attention:
    """Call SDPA, with a mask of bools where a case hides more than is_causal does."""
    mask = None
    if hides(case):
        b, i = (torch.arange(n, device=device) for n in (case.batch, case.length))
        mask = seen(case, device)(b[:, None, None, None], 0, i[:, None], i)
        mask = mask.expand(*(1,) * (4 - mask.ndim), *mask.shape)

    options: dict[str, Any] = {"is_causal": case.causal} if mask is None else {"attn_mask": mask}
    options |= {"dropout_p": case.dropout, "enable_gqa": case.varied.group > 1}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def against_sdpa(case: Case) -> str | None:
    """Return what SDPA lacks for a case."""
    return "SDPA has no sink" if case.varied.sink else "SDPA has no packed sequences" if case.varied.packed else None


def flex(case: Case, device: torch.device) -> Attention:
    """Call FlexAttention, compiled, with lists of tiles that are made once. Its log-sum-exp serves a sink."""
    import torch._functorch.config as functorch
    from torch.nn.attention import flex_attention as of

    functorch.donated_buffer = False  # a backward is timed several times on one graph
    torch._dynamo.reset()  # it compiles a few shapes, then gives up and runs eagerly
    packed, blocks = case.varied.packed, None
    if case.causal or hides(case):
        length, batch = case.shape[-3], case.batch if case.varied.padded else None
        blocks = of.create_block_mask(seen(case, device), batch, None, length, length, device=device)
    options = {"block_mask": blocks, "enable_gqa": case.varied.group > 1}

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        if sink is None:
            return of.flex_attention(q, k, v, **options)  # type: ignore[return-value]
        o, aux = of.flex_attention(q, k, v, return_aux=of.AuxRequest(lse=True), **options)
        return (o * torch.sigmoid(aux.lse - sink[:, None])[..., None]).to(q.dtype)  # type: ignore[union-attr]

    attend: Any = torch.compile(run, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        heads = ((t[None] if packed else t).transpose(1, 2) for t in (q, k, v))
        o = attend(*heads, *sink).transpose(1, 2)
        return o[0] if packed else o

    return call


def varlen(case: Case, device: torch.device) -> Attention:
    """Call varlen_attn on packed sequences. A padded batch is packed before it, and padded again after it."""
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor((0, *accumulate(case.lengths)), dtype=torch.int32, device=device)
    longest = max(case.lengths)
    at = case.real(device).flatten().nonzero()[:, 0] if case.varied.padded else None
    options: dict[str, Any] = _masks(case)
    options |= {"enable_gqa": True} if case.varied.group > 1 else {}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [t if t.ndim == 3 else t.flatten(0, 1) for t in (q, k, v)]
        rows = rows if at is None else [t.index_select(0, at) for t in rows]
        o: Any = varlen_attn(rows[0], rows[1], rows[2], cu, cu, longest, longest, **options)
        if at is not None:
            o = o.new_zeros(q.shape).flatten(0, 1).index_copy(0, at, o)
        return o.view(q.shape)

    return call


def _masks(case: Case) -> dict[str, Any]:
    """Return how this release of PyTorch wants to know a causal mask and a window."""
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return {"is_causal": case.causal}
    left = next((part.left for part in case.varied.mask.parts if isinstance(part, Window)), None)
    return {"window_size": (-1 if left is None else left, 0 if case.causal else -1)}


def against_varlen(case: Case) -> str | None:
    """Return what varlen_attn lacks for a case."""
    try:
        takes = _masks(case)
    except ImportError:
        return f"PyTorch {torch.__version__} has no varlen_attn"
    lacks = {
        "sink": case.varied.sink,
        "dropout": case.dropout > 0.0,
        "window": bool(case.varied.mask.parts) and "window_size" not in takes,
    }
    return next((f"varlen_attn has no {name}" for name, asked in lacks.items() if asked), None)
