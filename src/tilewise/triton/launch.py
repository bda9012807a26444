"""Launches: from a problem and its operands to kernel arguments. Nothing here decides anything about numbers."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..mask import OPEN, Value
from ..problem import Grads, Operands, Problem, Saved
from ..reference import dropout_threshold, sink_gradient
from ..score import Bias
from ..tile import masks, scores
from ..tile.dropout import Dropout
from ..tile.rows import Packed, Rows
from ..tile.softmax import LOG2E
from . import backward as kernels
from .blocks import Visits, list_tiles
from .forward import forward as forward_kernel
from .tiles import DKDV, DQ, FORWARD, Tiles, choose

TINY = 2.0**-126
CACHED_KEYS = 32 << 20
"""Bytes of K and V that programs running side by side may share: what stays in a data-centre chip's L2."""


class Plan(NamedTuple):
    """Everything about a launch that follows from the problem alone."""

    forward: Tiles
    dkdv: Tiles
    dq: Tiles
    c: float
    """Logits times c are in base 2."""
    factor: float
    """What the sums of dS K and dS^T Q are multiplied by."""
    section: int
    listed: bool
    """Whether the mask is no interval, so that tiles are listed first."""
    constants: dict[str, Any]


@lru_cache(4096)
def plan(p: Problem) -> Plan:
    """Tiles and constants of a problem."""
    per_head = p.N * (p.D + p.D_v) * p.q.dtype.itemsize
    group = p.H // p.H_k
    section = max(1, CACHED_KEYS // max(1, per_head)) * group
    constants = {"G": group, "d": p.D, "d_v": p.D_v, "PRECISION": precision(p) or "ieee"}
    # scores want scaled logits; without them the scale goes into the exponent. A scale of 0 stays above it, so that
    # -inf * c is -inf; exp2(tiny) is 1 all the same.
    c, factor = (LOG2E.value, 1.0) if p.recipe.score else (max(p.scale * LOG2E.value, TINY), p.scale)
    listed = not all(getattr(kind, "interval", True) for kind in p.kinds)
    return Plan(choose(FORWARD, p), choose(DKDV, p), choose(DQ, p), c, factor, section, listed, constants)


def precision(p: Problem) -> str | None:
    """How tl.dot multiplies fp32; None if no way honours the request, or if the type is not fp32."""
    if p.dtype != torch.float32:
        return None
    if p.target == "cpu":
        return "ieee"  # the interpreter computes in plain fp32, which honours every name
    if p.target in ("sm_70", "sm_72", "sm_75"):
        return p.precision(("ieee",))
    if p.target.startswith("gfx"):
        return p.precision(("ieee", "bf16x6", "bf16x3"))
    return p.precision(("ieee", "bf16x6", "tf32x3", "bf16x3", "tf32"))


def forward(p: Problem, x: Operands, seed: Tensor | None) -> Saved:
    """o and lse in one launch (and one before it if tiles are listed)."""
    o = torch.empty((*x.q.shape[:-1], p.D_v), dtype=p.dtype, device=x.q.device)
    lse = torch.empty(_row_shape(p), dtype=torch.float32, device=x.q.device)
    if o.numel() == 0:
        return Saved(o, lse, seed)
    pl = plan(p)
    parts, changes, sink = device_values(p, x)
    tiles = triton.cdiv(p.M, pl.forward.B_r)
    heads = p.B * p.H
    if heads * tiles == 0:
        return Saved(o.zero_(), lse.fill_(-torch.inf), seed)
    forward_kernel[(heads * tiles,)](
        *(_rows(p, t) for t in (*x[:3], o)), _row_values(p, lse), packed(p, x), sink, parts, changes,
        _dropout(p, seed), visits(p, pl.forward, parts, x.q.device, by_key=False),
        pl.c, p.M, p.N, p.H, heads, pl.section, tiles, **pl.constants, **_meta(pl.forward),
    )  # fmt: skip
    return Saved(o, lse, seed)


def backward(p: Problem, x: Operands, saved: Saved, do: Tensor | None, dlse: Tensor | None) -> Grads:
    """Delta, dK and dV, dQ, and what extras want."""
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x[:3])
    extra: list[Tensor | None] = [
        torch.zeros(t.shape, dtype=torch.float32, device=t.device) if want else None
        for t, want in zip(x.extra, p.wanted, strict=True)
    ]
    sums = torch.empty_like(saved.lse)
    pl = plan(p)
    parts, changes, _ = device_values(p, x)
    if do is None:
        do = torch.zeros((), dtype=p.dtype, device=x.q.device).expand(saved.o.shape)
    where = packed(p, x)
    _delta(p, saved.o, do, dlse, sums, where)
    given = (*(_rows(p, t) for t in (*x[:3], do)), _row_values(p, saved.lse), _row_values(p, sums))
    dropped = _dropout(p, saved.seed)

    tiles = triton.cdiv(p.N, pl.dkdv.B_c)
    heads = p.B * p.H_k
    if heads * tiles:
        lists = visits(p, pl.dkdv, parts, x.q.device, by_key=True)
        kernels.dkdv[(heads * tiles,)](
            *given, _rows(p, dk), _rows(p, dv), where, parts, changes, dropped, lists,
            pl.c, pl.factor, 1.0, p.M, p.N, p.H_k, heads, pl.section, tiles, **pl.constants, **_meta(pl.dkdv),
        )  # fmt: skip
    tiles = triton.cdiv(p.M, pl.dq.B_r)
    heads = p.B * p.H
    if heads * tiles:
        lists = visits(p, pl.dq, parts, x.q.device, by_key=False)
        kernels.dq[(heads * tiles,)](
            *given, _rows(p, dq), where, parts, changes, dropped, lists,
            pl.c, pl.factor, 1.0, p.M, p.N, p.H, heads, pl.section, tiles, **pl.constants, **_meta(pl.dq),
        )  # fmt: skip
    _learn(p, x, given, (parts, changes, dropped), extra, saved, sums)
    typed = [None if g is None else g.to(t.dtype) for g, t in zip(extra, x.extra, strict=True)]
    return Grads(dq, dk, dv, tuple(typed))


def _delta(p: Problem, o: Tensor, do: Tensor, dlse: Tensor | None, sums: Tensor, where: Packed | None) -> None:
    B_R = 64
    tiles = triton.cdiv(p.M, B_R)
    if p.B * p.H * tiles:
        dL = None if dlse is None else _row_values(p, dlse)
        kernels.delta[(p.B * p.H * tiles,)](
            _rows(p, o), _rows(p, do), dL, _row_values(p, sums), where, p.M, p.H, tiles, d_v=p.D_v, B_R=B_R
        )


def _learn(
    p: Problem, x: Operands, given: Any, values: Any, extra: list[Tensor | None], saved: Saved, sums: Tensor
) -> None:
    """Fills the gradients of biases and of the sink."""
    pl = plan(p)
    index = 0
    first_score = len(p.recipe.mask)
    for position, kind in enumerate(p.kinds):
        grad = extra[index] if kind.captures else None
        if grad is not None and grad.numel():
            # the scale stands before all scores, so score s is entry s + 1 of the kernel's tuple
            _launch_dbias(p, pl, given, values, grad, position - first_score + 1)
        index += len(kind.captures)
    if p.recipe.sink and extra[index] is not None:
        extra[index] = sink_gradient(x.extra[index], saved.lse, sums)


def _launch_dbias(p: Problem, pl: Plan, given: Any, values: Any, grad: Tensor, which: int) -> None:
    if 0 in (p.B, p.M, p.N):
        return
    parts, changes, dropped = values
    whole = grad[(None,) * (4 - grad.ndim)]
    batch, heads, rows, columns = whole.shape
    tiles_r, tiles_c = triton.cdiv(rows, pl.dq.B_r), triton.cdiv(columns, pl.dq.B_c)
    kernels.dbias[(batch * heads * tiles_r * tiles_c,)](
        *given, Rows(grad, whole.stride(0), whole.stride(2), whole.stride(1), whole.stride(3)), parts, changes, dropped,
        pl.c, p.M, p.N, p.H, rows, columns, heads, tiles_r, tiles_c, p.B // batch, p.H // heads,
        triton.cdiv(p.M, pl.dq.B_r) if rows == 1 else 1, triton.cdiv(p.N, pl.dq.B_c) if columns == 1 else 1,
        WHICH=which, ONE_ROW=rows == 1, ONE_COLUMN=columns == 1, **pl.constants, **_meta(pl.dq),
    )  # fmt: skip


def visits(p: Problem, tiles: Tiles, parts: Any, device: torch.device, by_key: bool) -> Visits | None:
    """None for interval masks, else the lists of the tiles that the mask leaves, 4 bytes a tile."""
    if not plan(p).listed:
        return None
    rows, columns = triton.cdiv(p.M, tiles.B_r), triton.cdiv(p.N, tiles.B_c)
    count, across = (columns, rows) if by_key else (rows, columns)
    batch, heads = _mask_shape(p)
    lists = torch.empty((batch, heads, count, across + 2), dtype=torch.int32, device=device)
    strides = [0 if size == 1 else stride for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)]
    made = Visits(lists, *strides, lists.stride(2))
    if lists.numel():
        list_tiles[(batch * heads * count,)](
            made, parts, p.M, p.N, heads, count, across, B_R=tiles.B_r, B_C=tiles.B_c, BY_KEY=by_key
        )
    return made


def _mask_shape(p: Problem) -> tuple[int, int]:
    """Over how many batch entries and heads the mask differs."""
    batch, heads, index = 1, 1, 0
    for kind in p.kinds[: len(p.recipe.mask)]:
        if kind.device == "dense":
            shape = p.extra[index].shape
            shape = (1,) * (4 - len(shape)) + tuple(shape)
            batch, heads = max(batch, shape[0]), max(heads, shape[1])
        elif kind.captures:
            batch = p.B
        index += len(kind.captures)
    return batch, heads


def device_values(p: Problem, x: Operands) -> tuple[Any, Any, Tensor | None]:
    """The mask's parts and the scores as kernel arguments, and the sink."""
    mask, score, sink = p.values(x)
    parts = tuple([_mask_part(p, part) for part in mask])
    changes = tuple([_score_part(p, change) for change in score])
    if changes:
        changes = (scores.Part(scores.scale_fn, scores.scale_grad, (p.scale,)), *changes)
    return parts, changes, sink


def _mask_part(p: Problem, mask: Any) -> masks.Part:
    keep = getattr(masks, f"{mask.device}_keep")
    if not mask.interval:
        return masks.Part(keep, masks.everywhere, masks.everywhere, _captured(p, mask))
    keys, queries = (getattr(masks, f"{mask.device}_{side}") for side in ("keys", "queries"))
    return masks.Part(keep, keys, queries, _captured(p, mask))


def _score_part(p: Problem, score: Any) -> scores.Part:
    grad = getattr(scores, f"{score.device}_grad", scores.unchanged)
    return scores.Part(getattr(scores, f"{score.device}_fn"), grad, _captured(p, score))


def _captured(p: Problem, value: Value) -> tuple[Any, ...]:
    """What the device functions of a value read, in their order: numbers, or tensors with their strides."""
    lengths = (p.M, p.N)
    match value.device:
        case "window":
            return tuple([OPEN if side is None else min(side, OPEN) for side in value.plain[1:]])
        case "prefix" | "padding":
            return (value.tensors[0].contiguous(),)
        case "padding_keys":
            return (value.tensors[0], *value.tensors[0].stride(), p.N)
        case "documents":
            q_ids, k_ids = value.tensors
            return (q_ids, *q_ids.stride(), k_ids, *k_ids.stride(), *lengths)
        case "dense" | "bias":
            (tensor,) = value.tensors
            return (tensor, *tensor.expand(p.B, p.H, *lengths).stride(), *lengths)
        case "alibi":
            (slopes,) = value.tensors
            return (slopes, slopes.stride(0) if slopes.ndim == 2 else 0, slopes.stride(-1))
        case _:
            return value.plain[1:]


def packed(p: Problem, x: Operands) -> Packed | None:
    """The layout's cu_seqlens as a kernel argument."""
    if not p.recipe.varlen:
        return None
    cu_q, cu_k = x.extra[-2:]
    return Packed(cu_q.contiguous(), cu_k.contiguous(), x.q.shape[0], x.k.shape[0])


def _dropout(p: Problem, seed: Tensor | None) -> Dropout | None:
    if seed is None:
        return None
    return Dropout(seed, dropout_threshold(p.recipe.dropout), 1.0 / (1.0 - p.recipe.dropout))


def _rows(p: Problem, t: Tensor) -> Rows:
    if p.recipe.varlen:
        row, head, entry = t.stride()
        return Rows(t, 0, row, head, entry)
    return Rows(t, *t.stride())


def _row_values(p: Problem, t: Tensor) -> Rows:
    """lse, its gradient and delta: one number a row, (B, H, M) or (H, T)."""
    if p.recipe.varlen:
        head, row = t.stride()
        return Rows(t, 0, row, head, 0)
    batch, head, row = t.stride()
    return Rows(t, batch, row, head, 0)


def _row_shape(p: Problem) -> tuple[int, ...]:
    return (p.H, p.q.shape[0]) if p.recipe.varlen else (p.B, p.H, p.M)


def _meta(tiles: Tiles) -> dict[str, int]:
    return {"B_R": tiles.B_r, "B_C": tiles.B_c, "num_warps": tiles.warps, "num_stages": tiles.stages}
