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
    given = k, v, k_new, v_new, q, y, call.cos, call.sin, *call.layout.values()
    kind = cache_append, tuple(call.layout), q is None, call.cos is None, call.interleaved
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
    B, M = len(call.layout["lengths"]), k_new.shape[-3]
    batch = batch_from(call.layout.get, B, M, count, call.capacity)
    turn, pairs = None, 0
    if call.cos is not None:
        cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (call.cos, call.sin))
        turn, pairs = Turn(cos, sin, cos.stride(0), sin.stride(0), odd(len(cos))), cos.shape[1]
    heads = min(HEADS, power_of_2(H_k))
    new = New(
        d, d_v, pairs, k.shape[1] if "table" in call.layout else 0, call.interleaved, heads,
        power_of_2(max(1, pairs)),
        power_of_2(d - 2 * pairs) if d > 2 * pairs else 0, power_of_2(d_v),
        power_of_2(B),
    )  # fmt: skip
    given = [None if t is None else rows(adjacent(t)) for t in (q, y, k_new, v_new)]
    programs = count * (cdiv(H, heads) + cdiv(H_k, heads))
    entries, pages = len(call.layout.get("table", k)), len(k)
    arguments = (*given, rows(k), rows(v), batch, turn, scales_of(call.layout.get, B, H_k), H, H_k, entries, pages)
    return [Launch(cache_append, programs, arguments, {"new": new, "num_warps": 4}, compiled)]
