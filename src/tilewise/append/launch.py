"""Launch of the kernel that writes new keys and values into a cache."""

from typing import Any

from torch import Tensor

from ..host import repeat
from ..host.arguments import adjacent, batch_from, cdiv, odd, power_of_2, rows, scales_of, sequences_in_line
from ..host.launch import Launch
from ..host.outputs import size
from ..host.replay import launch_replayed, replays_of
from .in_torch import Append
from .kernel import New, Rotary, cache_append

HEADS = 8
"""Heads of a program, at most."""


def launch(call: Append, y: Tensor | None) -> None:
    """Write new keys and values into the cache, and q into y; keys and q with rotary applied."""
    launch_replayed(*what_varies(call, y), lambda compiled: launches(call, y, compiled))


def what_varies(call: Append, y: Tensor | None) -> tuple[Any, list[Tensor]]:
    """Return all that a launch depends on beside its tensors, and these."""
    kind = cache_append, call.layout.plain, call.q is None, call.cos is None, call.interleaved
    return kind, [*call.tensors, *(() if y is None else (y,))]


def repeated(call: Append, y: Tensor | None) -> repeat.Append | None:
    """Return what repeats the launch of a call that has run; None if none was saved."""
    _, replay = replays_of(*what_varies(call, y))
    if replay.launches is None:
        return None
    return repeat.Append(replay, call.tensors, None if y is None else size(y.dtype, *y.shape))


def launches(call: Append, y: Tensor | None, compiled: dict[Any, Any]) -> list[Launch]:
    """Return the launch, or none if there is nothing to write."""
    k, v, k_new, v_new, layout, *_, q = call
    count, B = k_new.shape[:-2].numel(), len(layout.lengths)
    if not count:
        return []
    H, H_k, d = 0 if q is None else q.shape[-2], *k.shape[-2:]
    entries, capacity, page = layout.extent(k.shape)
    batch = batch_from(layout, B, k_new.shape[-3], count, capacity)
    rotary, pairs, interleaved = None, 0, False
    if (angles := call.angles) is not None:
        rotary, pairs, interleaved = Rotary(*angles.tables(), odd(len(angles.cos))), angles.pairs, angles.interleaved
    heads, rest = min(HEADS, power_of_2(H_k)), d - 2 * pairs
    blocks = heads, power_of_2(max(1, pairs)), power_of_2(rest) if rest else 0, power_of_2(v.shape[-1])
    line = 1 if batch.cu_q is None else sequences_in_line(B)
    new = New(d, v.shape[-1], pairs, page, interleaved, *blocks, line)
    given = [None if t is None else rows(adjacent(t)) for t in (q, y, k_new, v_new)]
    programs = count * (cdiv(H, heads) + cdiv(H_k, heads))
    arguments = (*given, rows(k), rows(v), batch, rotary, scales_of(layout, B, H_k), H, H_k, entries, len(k))
    return [Launch(cache_append, programs, arguments, {"new": new, "num_warps": 4}, compiled)]
