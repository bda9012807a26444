"""PyTorch's fused CPU attention, called by its aten operator, which also returns lse and has a backward."""

from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..call.backend import holding
from ..call.calls import guard
from ..call.operands import Grads, Operands, Saved
from ..call.problem import Problem, empty_parts
from .precision import SETTING
from .sequences import compute_type
from .strips import FEW, FEWEST, Strip, kept, plain, strips
from .tiled import LARGE_LSE

flash: Any = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@cache
def bf16_units() -> bool:
    """Tell whether the processor multiplies bf16. Elsewhere the kernel is as slow as in fp32, and tiles are faster."""
    return any([getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("amx_tile", "avx512_bf16")])


def why_not(p: Problem) -> list[str]:
    """Return what the call needs that PyTorch's kernel lacks; empty if the kernel can run it."""
    r = p.recipe
    return holding({
        "packed sequences": not p.layout.uniform,
        "products in 8 bits": p.products.codes,
        "scores but a bias": [name for name, *_ in r.score] not in ([], ["Bias"]),
        "a sink": r.sink,
        "dropout": r.dropout > 0.0,
        "another head size for v": p.D_v != p.D,
        "results in fp32": p.out_dtype != p.dtype,
        "no queries or keys": 0 in (p.B, p.M, p.N),
        "a mask or a bias of few logits": not plain(p) and p.dtype == torch.float32 and p.B * p.H * p.M * p.N < FEWEST,
        "bf16 at the speed of bf16": p.dtype == torch.bfloat16 and not bf16_units(),
        "exact exponentials": p.dtype == torch.bfloat16 and p.scale == 0.0,  # its error is 5e-5, which rounding S hides
    })  # fmt: skip


def why_not_backward(p: Problem) -> list[str]:
    """Return the same for its backward."""
    # it sums dq, dk and dv in fp16, once per block and head: the error is 0.3 % at 32k queries, and tiles are no slower
    return [*why_not(p), *["sums in fp16"] * (p.dtype == torch.float16), *["a gradient of the bias"] * any(p.wanted)]


def added_up(p: Problem) -> tuple[int, int]:
    """Return the queries and keys of a strip: the kernel rounds a sum to 16 bits for every 256 queries or 512 keys."""
    return (max(1024, 2048 // (p.H // p.H_k)), 2048) if p.dtype.itemsize == 2 else (p.M, p.N)


def added_at_once(p: Problem) -> bool:
    """Tell whether one strip has all queries and keys."""
    return p.M <= added_up(p)[0] and p.N <= added_up(p)[1]


def forward(p: Problem, x: Operands) -> Saved | None:
    """Compute o and lse; None where tiles are faster."""
    found = []
    for s in strips(p, x, (p.M, p.N)):
        o, lse = _kernel(p, _part(p, s, *x[:3]), s)
        lse = lse.to(compute_type(p)).nan_to_num(torch.nan, torch.nan, -torch.inf)  # inf - inf is NaN, as elsewhere
        if s.keep is not None and bool((lse == 0.0).any()):
            lse = lse.masked_fill(~s.keep.any(-1), -torch.inf)
        found.append((_rows(p, o), lse.reshape(p.B, p.H, -1)))
    if len(found) == 1:
        o, lse = found[0]
        return Saved(o.contiguous(), lse.contiguous())
    return Saved(torch.cat([o for o, _ in found], 1), torch.cat([lse for _, lse in found], 2)) if found else None


def doubtful(p: Problem, saved: Saved) -> bool:
    """Tell whether a row may be wrong: lse is 0 if all its logits are NaN or -inf; in fp16, o is 0 for some NaN; a NaN
    at a hidden key remains one."""
    odd = saved.lse == 0.0
    return bool((odd if plain(p) and p.dtype != torch.float16 else odd | saved.lse.isnan()).any())


def backward(p: Problem, x: Operands, saved: Saved, do: Tensor) -> Grads | None:
    """Compute dq, dk and dv; None where tiles are faster, or must look at logits that are not finite."""
    lse = saved.lse.nan_to_num(torch.nan, torch.nan, 0.0)  # of a row without keys: exp(-inf - -inf) is NaN
    if p.biased and bool((lse.abs() >= LARGE_LSE).any()):
        return None
    sums: Any = None
    for s in strips(p, x, added_up(p)):
        found = _kernel_backward(p, _part(p, s, *x[:3], saved.o, do), lse[..., s.rows], s)
        if [g.shape for g in found] == [t.shape for t in x[:3]]:
            sums = found  # there is no other strip
            break
        sums = sums or [torch.zeros(t.shape, dtype=compute_type(p), device="cpu") for t in x[:3]]
        for total, grad, at in zip(sums, found, (s.rows, s.keys, s.keys), strict=True):
            total[:, at] += grad
    if sums is None or (not plain(p) and bool(sums[0].sum().isnan())):  # NaN - inf, at a hidden key, is NaN
        return None
    if p.recipe.packed:  # the kernel allocates three tensors
        sums = [part.copy_(g) for part, g in zip(empty_parts(p, x), sums, strict=True)]
    dq, dk, dv = sums if p.recipe.packed else [g.to(p.dtype).contiguous() for g in sums]
    return Grads(dq, dk, dv, (None,) * len(x.extra))


class Repeated:
    """A forward of one strip, repeated for tensors like those that it had."""

    name = "cpu"

    def __init__(self, p: Problem, strip: Strip, do: Tensor | None) -> None:
        self.alike: Any = do is not None and guard((do,))
        self.causal, self.scale = strip.causal, p.scale
        self.mask = None if plain(p) else (p, p.values(())[0], 0, p.M, 0, p.N)
        self.differentiable = p.dtype == torch.bfloat16 and added_at_once(p) and plain(p)
        """Whether autograd may call the kernel's backward. In fp32 torch's setting may change; a mask may hide NaN."""
        self.inexact = SETTING.inexact if p.dtype == torch.float32 else bool

    def run(self, tensors: Sequence[Tensor], seed: Tensor | None) -> tuple[Any, ...] | None:
        """Return o, lse, the seed and no tensors for the backward; None where `forward` must look."""
        q, k, v = tensors
        with SETTING.lock:
            if self.inexact():
                return None
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            added = self.mask and kept(*self.mask)[1]
            o, lse = flash(q, k, v, 0.0, self.causal, attn_mask=added, scale=self.scale)
        sure = lse.count_nonzero().item() == lse.numel() and (added is None or isfinite(lse.sum().item()))
        return (o.transpose(1, 2), lse, seed, ()) if sure else None


class RepeatedBackward(Repeated):
    """Its backward."""

    def run(self, do: Tensor, given: Sequence[Tensor]) -> list[Tensor] | None:  # type: ignore[override]
        """Return dq, dk and dv; None where `backward` must look."""
        with SETTING.lock:
            if self.inexact() or not self.alike(do):
                return None
            q, k, v, o, do = [t.transpose(1, 2) for t in (*given[:4], do)]
            lse = given[4].nan_to_num(torch.nan, torch.nan, 0.0)
            added = self.mask and kept(*self.mask)[1]
            found = flash_backward(do, q, k, v, o, lse, 0.0, self.causal, attn_mask=added, scale=self.scale)
        wrong = added is not None and bool(found[0].sum().isnan())
        return None if wrong else [g.transpose(1, 2).contiguous() for g in found]


def repeated(p: Problem, x: Operands, given: Any, do: Tensor | None = None) -> Any:
    """Return what repeats a forward of one strip, or given its results and do a backward; None where it may not."""
    why, read = (why_not(p), x[:3]) if do is None else (why_not_backward(p), (*x[:3], do))
    why += holding({
        "tensors": p.extra, "one tensor": p.recipe.packed, "NaN": p.dtype == torch.float16,
        "a large mask": not plain(p) and p.M * p.N > FEW, "sums of strips": do is not None and not added_at_once(p),
        "rows of one head": p.M == 1 and p.H != p.H_k, "copies": any([t.stride(-1) != 1 for t in read]),
    })  # fmt: skip
    found = [] if why else [s for s in strips(p, x, (p.M, p.N)) if s.keep is None or bool(s.keep.any(-1).all())]
    whole = [s[:2] for s in found] == [(slice(0, p.M), slice(0, p.N))]
    return (Repeated if do is None else RepeatedBackward)(p, found[0], do) if whole else None


def _part(p: Problem, s: Strip, *tensors: Tensor) -> list[Tensor]:
    """Return a strip's q, k, v, o and do."""
    return [t[:, s.keys if n in (1, 2) else s.rows] for n, t in enumerate(tensors)]


def _kernel(p: Problem, x: Sequence[Tensor], s: Strip) -> tuple[Tensor, Tensor]:
    given = _queries(p, x[0]), *(_readable(t).transpose(1, 2) for t in x[1:])
    return flash(*given, 0.0, s.causal, attn_mask=s.added, scale=p.scale)


def _kernel_backward(p: Problem, x: Sequence[Tensor], lse: Tensor, s: Strip) -> tuple[Tensor, ...]:
    """Return dq, dk and dv, in any strides."""
    q, o, do = [_queries(p, x[n]) for n in (0, 3, 4)]
    given = do, q, *(_readable(t).transpose(1, 2) for t in x[1:3]), o, lse.reshape(q.shape[:3])
    dq, dk, dv = flash_backward(*given, 0.0, s.causal, attn_mask=s.added, scale=p.scale)
    return _rows(p, dq), dk.transpose(1, 2), dv.transpose(1, 2)


def _queries(p: Problem, t: Tensor) -> Tensor:
    """Return a view (B, H, M, D). A single query becomes (B, H_k, G, D), so a group's G heads read its keys once."""
    t = _readable(t)
    return t.unflatten(2, (p.H_k, -1))[:, 0] if p.M == 1 and plain(p) else t.transpose(1, 2)


def _rows(p: Problem, t: Tensor) -> Tensor:
    """Undo `_queries`: return a view (B, M, H, D)."""
    return t.flatten(1, 2)[:, None] if p.M == 1 and plain(p) else t.transpose(1, 2)


def _readable(t: Tensor) -> Tensor:
    """Return the tensor, or a copy whose last stride is 1, which the kernel assumes without a check."""
    return t if t.stride(-1) == 1 else t.contiguous()
