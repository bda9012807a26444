"""Launch of the kernel that writes new keys and values into a cache."""

from typing import Any

import triton
from torch import Tensor

from ..tile.append import New, Turn, cache_append
from ..tile.cache import Batch, Scales
from ..tile.rows import Rows
from .launch import Launch, adjacent, cdiv
from .replay import launch_kept

power_of_2: Any = triton.next_power_of_2
HEADS = 8
"""Heads of a program, at most."""


def launch(k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor | None, call: Any) -> None:
    """Write k_new and v_new into k and v, and q, turned, into y. `call` is an append.Append."""
    given = k, v, k_new, v_new, q, y, call.cos, call.sin, *call.layout.values()
    kind = cache_append, tuple(call.layout), q is None, call.cos is None, call.interleaved
    launch_kept(
        kind,
        [t for t in given if t is not None],
        lambda compiled: launches(k, v, k_new, v_new, q, y, call, compiled),
    )


def launches(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor | None, call: Any,
    compiled: dict[Any, Any],
) -> list[Launch]:  # fmt: skip
    """Return the launch, or none if there is nothing to write."""
    packed = "cu_q" in call.layout
    H, H_k, d, d_v = 0 if q is None else q.shape[-2], k.shape[2], k.shape[3], v.shape[3]
    table = call.layout.get("table")
    rows = k_new.shape[:-2].numel()
    if not rows or not len(call.layout["lengths"]):
        return []
    B, M = len(call.layout["lengths"]), k_new.shape[-3]
    sizes = [2 * n + 1 for n in (B, M, rows, call.capacity)]
    tensors = (
        None if t is None else t.contiguous() for t in map(call.layout.get, ("cu_q", "lengths", "starts", "index"))
    )
    if table is not None and table.stride(-1) != 1:
        table = table.contiguous()
    cu_q, lengths, starts, index = tensors
    width = 0 if table is None else 2 * table.stride(0) + 1
    batch = Batch(cu_q, lengths, starts, index, table, width, *sizes)  # type: ignore[call-arg]
    turn, pairs = None, 0
    if call.cos is not None:
        cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (call.cos, call.sin))
        turn, pairs = Turn(cos, sin, cos.stride(0), sin.stride(0), 2 * len(cos) + 1), cos.shape[1]
    heads = min(HEADS, power_of_2(H_k))
    new = New(
        d, d_v, pairs, 0 if table is None else k.shape[1], call.interleaved, heads,
        power_of_2(max(1, pairs)),
        power_of_2(d - 2 * pairs) if d > 2 * pairs else 0, power_of_2(d_v),
        power_of_2(B),
    )  # fmt: skip
    given = [None if t is None else _rows(adjacent(t), packed) for t in (q, y, k_new, v_new)]
    scales = None
    if "k_scale" in call.layout:
        given_scales = call.layout["k_scale"], call.layout["v_scale"]
        (k_batch, k_head), (v_batch, v_head) = (t.expand(B, H_k).stride() for t in given_scales)
        scales = Scales(given_scales[0], k_batch, k_head, given_scales[1], v_batch, v_head)
    caches = [Rows(t, *t.stride()[:3]) for t in (k, v)]
    programs = rows * (cdiv(H, heads) + cdiv(H_k, heads))
    arguments = (*given, *caches, batch, turn, scales, H, H_k)
    return [Launch(cache_append, programs, arguments, {"new": new, "num_warps": 4}, compiled)]


def _rows(t: Tensor, packed: bool) -> Rows:
    return Rows(t, 0, *t.stride()[:2]) if packed else Rows(t, *t.stride()[:3])
