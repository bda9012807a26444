"""Launch of the kernel that writes new keys and values into a cache."""

from typing import Any

from torch import Tensor

from ..host.arguments import adjacent, batch_from, cdiv, odd, power_of_2, rows, scales_of
from ..host.launch import Launch
from ..host.replay import launch_kept
from .kernel import New, Turn, cache_append

HEADS = 8
"""Heads of a program, at most."""


def launch(k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor | None, call: Any) -> None:
    """Write k_new and v_new into k and v, and q, turned, into y. `call` is an append.Append."""
    angles = call.angles
    given = k, v, k_new, v_new, q, y, *(() if angles is None else (angles.cos, angles.sin)), *call.layout.tensors
    kind = cache_append, call.layout.plain, q is None, angles and angles.interleaved
    launch_kept(
        kind,
        [t for t in given if t is not None],
        lambda compiled: launches(k, v, k_new, v_new, q, y, call, compiled),
        call.kind,
    )


def launches(
    k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor | None, call: Any,
    compiled: dict[Any, Any],
) -> list[Launch]:  # fmt: skip
    """Return the launch, or none if there is nothing to write."""
    H, H_k, d, d_v = 0 if q is None else q.shape[-2], k.shape[2], k.shape[3], v.shape[3]
    count = k_new.shape[:-2].numel()
    if not count:
        return []
    layout, B, M = call.layout, len(call.layout.lengths), k_new.shape[-3]
    batch = batch_from(layout, B, M, count, call.capacity)
    turn, pairs, interleaved = None, 0, False
    if call.angles is not None:
        cos, sin = call.angles.adjacent()
        turn, pairs = Turn(cos, sin, cos.stride(0), sin.stride(0), odd(len(cos))), cos.shape[1]
        interleaved = call.angles.interleaved
    heads = min(HEADS, power_of_2(H_k))
    new = New(
        d, d_v, pairs, 0 if layout.table is None else k.shape[1], interleaved, heads,
        power_of_2(max(1, pairs)),
        power_of_2(d - 2 * pairs) if d > 2 * pairs else 0, power_of_2(d_v),
        power_of_2(B),
    )  # fmt: skip
    given = [None if t is None else rows(adjacent(t)) for t in (q, y, k_new, v_new)]
    programs = count * (cdiv(H, heads) + cdiv(H_k, heads))
    entries, pages = len(k if layout.table is None else layout.table), len(k)
    arguments = (*given, rows(k), rows(v), batch, turn, scales_of(layout, B, H_k), H, H_k, entries, pages)
    return [Launch(cache_append, programs, arguments, {"new": new, "num_warps": 4}, compiled)]
