"""Launch of the kernel that writes new keys and values into a cache."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..host.arguments import adjacent, batch_from, cdiv, odd, power_of_2, rows, scales_of
from ..host.launch import Launch
from ..host.outputs import size
from ..host.repeat import Append
from ..host.replay import launch_replayed, replays_of
from ..values.layout import Layout
from ..values.rotation import Angles
from .kernel import New, Turn, cache_append

HEADS = 8
"""Heads of a program, at most."""


def launch(k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, y: Tensor | None, call: Any) -> None:
    """Write k_new and v_new into k and v, and q, turned, into y. `call` is an append.Append."""
    angles = () if call.angles is None else (call.angles.cos, call.angles.sin)
    given = [t for t in (k, v, k_new, v_new, q, y, *angles, *call.layout.tensors) if t is not None]
    kind = kind_of(call.layout, q, call.angles)
    launch_replayed(kind, given, lambda compiled: launches(k, v, k_new, v_new, q, y, call, compiled))


def kind_of(layout: Layout, q: Tensor | None, angles: Angles | None) -> Any:
    """Return all that a launch depends on beside its tensors."""
    return cache_append, layout.plain, q is None, angles and angles.interleaved


def repeated(
    given: Sequence[Tensor], q: Tensor | None, y: Tensor, layout: Layout, angles: Angles | None
) -> Append | None:
    """Return what repeats the launch of a call that has run; None if it was not kept. `given`: k, v, k_new, v_new, q,
    cos and sin if there are, and the layout's tensors."""
    order, tensors = [*range(len(given))], [*given]
    if q is not None:  # its result is the launch's sixth tensor
        order.insert(5, len(given))
        tensors.insert(5, y)
    _, replay = replays_of(kind_of(layout, q, angles), tensors)
    return None if replay.kept is None else Append(replay, given, order, q if q is None else size(q.dtype, *q.shape))


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
