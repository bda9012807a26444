"""The public functions for attention: attention(), attention_qkvpacked(), merge() and explain()."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Never, Unpack  # in typing from Python 3.11 on; PyTorch brings it

from .backend import ORDER, candidates, load, refusals
from .describe import check_number, check_values, describe, describe_fake
from .layout import Varlen
from .mask import Full, Mask
from .operator import attend
from .options import Everything, Options, refuse_mask, refuse_score, refuse_unknown, spell_out
from .problem import PRECISIONS, Operands, Problem, Recipe, matmul_setting, target_of
from .score import Alibi, Score

FULL = Full()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = FULL,
    score: Score | Sequence[Score] = (),
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    layout: Varlen | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * Q K^T) V exactly, in memory linear in the length (Dao et al. 2022, 2023).

    Args:
        q: (B, M, H, D), any strides; fp16, bf16, fp32, or fp64 on the CPU. With `layout`, (T, H, D).
        k: (B, N, H_k, D), H a multiple of H_k: each key head serves H / H_k query heads. With `layout`, (T', H_k, D).
        v: (B, N, H_k, D_v). Head sizes are 1 to 256. With `layout`, (T', H_k, D_v).
        mask: a Mask; combine several with `&`. A row that sees no key has o = 0, lse = -inf and gradients of 0.
        score: a Score or a sequence of them, applied left to right to the scaled logits, before the mask.
        scale: factor on the logits, >= 0; default D ** -0.5.
        sink: (H,) logits added to the softmax's denominator, fp32 or q's type; differentiable.
        dropout: probability in [0, 1) of dropping an entry of P, rounded to a multiple of 2^-16. Kept entries are
            multiplied by 1 / (1 - the rounded probability). Below 2^-17, nothing is dropped.
        seed: int or scalar int64 tensor on q's device, for dropout; None draws one from torch's generator.
        layout: Varlen(cu_q, cu_k, max_q, max_k) for packed sequences.
        precision: the least accuracy of fp32 products: "ieee", "bf16x6", "fp16x3", "tf32x3", "bf16x3" or "tf32".
            It is for fp32 inputs only. None follows torch.get_float32_matmul_precision().
        deterministic: make gradients bitwise repeatable, as o, dk and dv always are.
            torch.use_deterministic_algorithms(True) has the same effect.
        return_lse: also return lse, natural log: (B, H, M), with `layout` (H, T); fp32, fp64 for fp64; differentiable.
        backend: "hopper", "triton" or "cpu" to require one; None chooses.

    Returns:
        o (B, M, H, D_v) in q's type, contiguous; with return_lse, (o, lse).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is allowed.
        Unsupported: no back end can run the call, or `backend` cannot.
        RuntimeError: forward-mode differentiation was used, or a gradient was differentiated.
    """
    if unknown:
        refuse_unknown("attention", unknown)
    x, recipe, longest = _gather(q, k, v, mask, score, scale, sink, dropout, layout, precision, deterministic, backend)
    drawn = _seed(seed, x.q, recipe.dropout)
    o, lse = attend((*x[:3], *x.extra), drawn, recipe, longest)
    return (o, lse) if return_lse else o


DEFAULTS: dict[str, Any] = attention.__kwdefaults__ or {}
"""It holds every option of `attention` with its default."""
SIGNATURE = inspect.signature(attention)
spell_out(attention, SIGNATURE)


@overload
def attention_qkvpacked(qkv: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_qkvpacked(
    qkv: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_qkvpacked(qkv: Tensor, **options: Unpack[Everything]) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of q, k and v stored in one tensor, as a joint projection writes them.

    The inputs are read in place. The gradient is one tensor of qkv's shape, and the back ends write dq, dk and dv
    directly into it. PyTorch's fused CPU kernel is the exception: its three gradients are copied there. The options
    are those of `attention`.

    Args:
        qkv: (B, N, 3, H, D), any strides. With `layout`, (T, 3, H, D), and cu_q equal to cu_k.

    Returns:
        o (B, N, H, D), contiguous; with return_lse, (o, lse).

    Raises:
        TypeError, ValueError, Unsupported, RuntimeError: as `attention`.
    """
    chosen = _options("attention_qkvpacked", options)
    seed, return_lse = chosen.pop("seed"), chosen.pop("return_lse")
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv must be a torch.Tensor, got {type(qkv).__name__}; convert it with torch.as_tensor(...)")
    shape = "(B, N, 3, H, D)" if chosen["layout"] is None else "(T, 3, H, D)"
    if qkv.ndim != shape.count(",") + 1 or qkv.shape[-3] != 3:
        packed = qkv.ndim == 4 and chosen["layout"] is None
        hint = "pass layout=Varlen(...) for packed sequences" if packed else "stack q, k and v in front of the heads"
        raise ValueError(f"qkv must have shape {shape}, got {tuple(qkv.shape)}; {hint}")
    if (kind := _autocast_type(qkv)) is not None:
        qkv = _cast(qkv, kind)
    q, k, v = qkv.unbind(-3)
    x, recipe, longest = _gather(q, k, v, **chosen)
    drawn = _seed(seed, qkv, recipe.dropout)
    o, lse = attend((qkv, None, None, *x.extra), drawn, recipe._replace(packed=True), longest)
    return (o, lse) if return_lse else o


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys into one; differentiable in every o and lse.

    Args:
        parts: (o, lse) pairs as `attention(..., return_lse=True)` returns them, all of one shape. A row with
            lse = -inf adds nothing. Pass the sink to one part only.

    Returns:
        o (in the parts' type) and lse, as if attention had seen all keys at once. They are lse = log(sum(exp(lse_p)))
        and o = sum(exp(lse_p - lse) * o_p).

    Raises:
        TypeError, ValueError: there is no part, or the parts differ in shape, type or device.
    """
    parts = [tuple(part) for part in parts]  # type: ignore[misc]
    if not parts:
        raise ValueError(
            "merge: parts must hold at least one (o, lse) pair, got none; call attention with return_lse=True"
        )
    for index, part in enumerate(parts):
        if len(part) != 2 or not all(isinstance(t, Tensor) for t in part):
            raise TypeError(
                f"merge: part {index} must be a pair of tensors (o, lse), got "
                f"({', '.join(type(t).__name__ for t in part)}); call attention with return_lse=True"
            )
        o, lse = part
        packed = o.ndim == 3
        rows = tuple(o.shape[:-1]) if packed else (o.shape[0], o.shape[1], o.shape[2]) if o.ndim == 4 else None
        if rows is None or tuple(lse.shape) != ((rows[1], rows[0]) if packed else (rows[0], rows[2], rows[1])):
            raise ValueError(
                f"merge: part {index} must have o (B, M, H, D) and lse (B, H, M), or packed (T, H, D) and (H, T), got "
                f"{tuple(o.shape)} and {tuple(lse.shape)}; pass both as attention returns them"
            )
        if o.shape != parts[0][0].shape or o.dtype != parts[0][0].dtype or o.device != parts[0][0].device:
            first = parts[0][0]
            raise ValueError(
                f"merge: part {index} must have part 0's shape, type and device, {tuple(first.shape)}, {first.dtype} "
                f"and {first.device}, got {tuple(o.shape)}, {o.dtype} and {o.device}; convert or reshape it"
            )
    lses = torch.stack([lse for _, lse in parts])  # (parts, B, H, M)
    m = lses.detach().amax(0)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = torch.exp(lses - m)
    l = weights.sum(0)
    empty = l == 0.0
    # both calls of where keep the gradient of an empty row at zero; without them it is inf * 0
    lse = torch.where(empty, -torch.inf, m + torch.log(torch.where(empty, 1.0, l)))
    weights = (weights / torch.where(empty, 1.0, l)).transpose(-1, -2).unsqueeze(-1)  # (parts, B, M, H, 1)
    o = reduce(torch.add, (w * o.to(w.dtype) for w, (o, _) in zip(weights, parts, strict=True)))
    return o.to(parts[0][0].dtype), lse


@dataclass(frozen=True)
class Explanation:
    """Which back end would run a call, with which tiles, and why others refuse. It prints as a table.

    `backend` is None if every back end refuses. `refusals` holds the reasons against each one.
    """

    backend: str | None
    tiles: str
    refusals: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"{'back end':<10}{'verdict'}"]
        for name, reasons in self.refusals.items():
            if name == self.backend:
                lines.append(f"{name:<10}runs this: {self.tiles}")
            elif reasons:
                lines.append(f"{name:<10}refuses: " + f"\n{'':<10}         ".join(reasons))
            else:
                lines.append(f"{name:<10}also able, lower priority")
        return "\n".join(lines)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, device: str | None = None, **options: Unpack[Everything]
) -> Explanation:
    """Explain which kernels `attention` would run for these arguments, without running them.

    Args:
        q, k, v, options: as for `attention`; the tensors may be on the meta device.
        device: None means q's device; "cpu", "sm_90", "gfx942", … name a chip that this machine need not have.

    Returns:
        An Explanation with .backend (None if all refuse), .tiles and .refusals. Print it to see a table.

    Raises:
        TypeError, ValueError: as for `attention`.
    """
    chosen = {name: value for name, value in _options("explain", options).items() if name not in ("seed", "return_lse")}
    x, recipe, longest = _gather(q, k, v, **chosen)
    problem = _hypothetical(x, recipe, longest, device)
    against = refusals(problem)
    chosen = next((name for name in candidates(problem) if not against[name]), None)
    return Explanation(chosen, load(chosen).tiles(problem) if chosen else "", against)


spell_out(attention_qkvpacked, SIGNATURE)
spell_out(explain, SIGNATURE)


def _options(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of `attention`, as given or by default."""
    if unknown := set(given) - set(DEFAULTS):
        refuse_unknown(function, unknown)
    return {**DEFAULTS, **given}


def _autocast_type(q: Tensor) -> torch.dtype | None:
    """Return autocast's type for q's device; None if autocast is off."""
    if q.is_meta:
        return None
    device = "cuda" if q.is_cuda else "cpu" if q.is_cpu else q.device.type  # device.type is slower to read
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _cast(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Cast a tensor as torch's autocast does for attention: every floating type except fp64."""
    return tensor.to(kind) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _hypothetical(x: Operands, recipe: Recipe, longest: tuple[int, int], device: str | None) -> Problem:
    matmul = matmul_setting() if x.q.dtype == torch.float32 and not recipe.precision else None
    target = device or target_of(x.q.device)
    if target == "meta":
        raise ValueError(
            "explain: device must name a chip for tensors on the meta device, got None; "
            'pass device="cpu", "sm_90", "gfx942", …'
        )
    addressed = all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in (*x[:3], *x.extra))
    return (describe if addressed else describe_fake)(x, recipe, longest)._replace(target=target, matmul=matmul)


def _gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    score: Score | Sequence[Score],
    scale: float | None,
    sink: Tensor | None,
    dropout: float,
    layout: Varlen | None,
    precision: str | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Operands, Recipe, tuple[int, int]]:
    """Check the arguments; return all tensors of the call in order, the recipe, and max_q and max_k of the layout."""
    whole = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if not whole or not q.layout is k.layout is v.layout is torch.strided:
        _refuse_operands(q=q, k=k, v=v)
    if not isinstance(mask, Mask):
        refuse_mask(mask)
    changes = _scores(score)
    if layout is not None and not isinstance(layout, Varlen):
        raise TypeError(f"layout must be None or a Varlen, got {layout!r}; write layout=tilewise.Varlen(cu_q, cu_k)")
    if scale is not None:
        scale = check_number("scale", scale, "finite, >= 0 and below 2^126", 0.0, 2.0**126)
    left_out = type(dropout) is float and dropout == 0.0  # torch.compile needs the constant itself
    dropout = 0.0 if left_out else check_number("dropout", dropout, "a probability in [0, 1)", 0.0, 1.0)
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(
            f"precision must be None or one of {', '.join(PRECISIONS)}, got {precision!r}; "
            "leave it out to follow torch.get_float32_matmul_precision()"
        )
    if backend is not None and backend not in ORDER:
        raise ValueError(
            f"backend must be None or one of {', '.join(ORDER)}, got {backend!r}; leave it out to have one chosen"
        )
    if sink is not None and (not isinstance(sink, Tensor) or sink.layout is not torch.strided):
        got = sink.layout if isinstance(sink, Tensor) else type(sink).__name__
        raise TypeError(f"sink must be a strided tensor of shape (H,), got {got}; pass one logit for each query head")
    if (kind := _autocast_type(q)) is not None:
        q, k, v = _cast(q, kind), _cast(k, kind), _cast(v, kind)
        if sink is not None and sink.dtype != torch.float32:  # an fp32 sink goes with any type of q
            sink = _cast(sink, kind)
    parts = mask.parts
    values = (*parts, *changes)
    if values:
        check_values(values)
    extra = [t for value in values if value.captures for t in value.tensors]
    extra += [] if sink is None else [sink]
    extra += [] if layout is None else [layout.cu_q, layout.cu_k]
    recipe = Recipe(
        tuple([part.plain for part in parts]),
        tuple([change.plain for change in changes]),
        sink is not None,
        layout is not None,
        scale,
        dropout,
        precision,
        bool(deterministic) or _asks_for_determinism(),
        backend,
    )
    return Operands(q, k, v, tuple(extra)), recipe, (0, 0) if layout is None else layout.longest()


def _scores(score: Score | Sequence[Score]) -> tuple[Score, ...]:
    """Check one score or several, and return them as a tuple."""
    if isinstance(score, Score):
        score = (score,)
    elif isinstance(score, str) or not isinstance(score, (tuple, list, Sequence)):  # the last check is slow
        refuse_score(score)
    for change in score:
        if not isinstance(change, Score):
            refuse_score(change)
        if isinstance(change, Alibi) and change.slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "Alibi: slopes must have no gradient, got requires_grad=True; detach them, or write the slopes as a "
                "Bias, which has one"
            )
    return tuple(score)


def _asks_for_determinism() -> bool:
    """Tell whether torch.use_deterministic_algorithms(True) is in force with errors, not only with warnings."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Dynamo cannot trace this function, and compiles again when the setting changes. We set the attribute that
# torch.compiler.assume_constant_result sets, because calling that would import all of torch._dynamo.
_asks_for_determinism._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refuse_operands(**operands: Any) -> None:
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor(...)"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} must be a strided tensor, got layout {tensor.layout}; convert it with .to_dense(), and pass "
                "sequences of several lengths packed, with layout=Varlen(...)"
            )


def _seed(seed: int | Tensor | None, q: Tensor, dropout: float) -> Tensor | None:
    """Return dropout's seed as a scalar int64 tensor on q's device, drawn if None; its value is never read back."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed must be an int or a scalar int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}; "
                "pass an int, or leave it out to have one drawn"
            )
        if seed.device != q.device:
            raise ValueError(f"seed must be on q's device {q.device}, got {seed.device}; move it with .to(...)")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed must be an int or a scalar int64 tensor, got {seed!r}; leave it out to have one drawn")
    elif isinstance(seed, int) and not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 bits, got {seed}; pass one in [-2^63, 2^63)")
    if dropout == 0.0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    return seed if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64, device=q.device)
